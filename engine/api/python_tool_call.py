"""Tool calls in Python syntax, `brave_search.call(query="...")`, which Llama 3.1 generates after its python tag."""

import ast
import json


def read_python_call(code: str) -> tuple[str, str] | None:
    """(name, JSON encoding of the arguments); None if ``code`` is not one call with literal keyword arguments."""
    try:
        call = ast.parse(code.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        name = ast.unparse(call.func).removesuffix(".call")
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if None in arguments or not name.replace(".", "_").isidentifier():
            return None
        return name, json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
