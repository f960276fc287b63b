"""The recorder: the process that writes what ranks send, and steers them."""
