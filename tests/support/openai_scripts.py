"""Scripted models for tests of the OpenAI routes."""

SCRIPTS = {
    "default": ["Hello", " there", "!"],
    "weather": [
        *("Let me look. ", "<tool_call>", '\n{"name": "get_weather", ', '"arguments": {"city": ', '"Paris"', "}}"),
        *("\n</tool_call>", "\n<tool_call>\n", '{"name": "get_time", "arguments": {}}', "</tool_call>"),
    ],
    "think": ["<think>", "\nhm ", "so be it\n", "</think>", "\n\nFine", " day."],
    "count": ["one ", "two ", "three ", "four ", "five"],
}
