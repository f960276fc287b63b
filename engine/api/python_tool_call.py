"""A tool call in Python's notation, `brave_search.call(query="...")`, as Llama 3.1 writes behind its python tag."""

import ast
import json


def read_python_call(code: str) -> tuple[str, str] | None:
    """(name, JSON text of the arguments), or None when ``code`` is not one call with literal keyword arguments."""
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
