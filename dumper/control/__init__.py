"""Control: HTTP routes, who may use them, what they take and give."""
