"""GrammarCompilerProcess: compile a grammar in a subprocess with resource limits before the engine compiles it.

llguidance bounds the work of its lexers and parsers, but not that of a JSON schema with overlapping patternProperties
(400 of them take 20 s, growing faster than n⁴). A thread cannot be interrupted, so the first attempt runs in a
subprocess with resource limits. The subprocess also converts the grammar to llguidance's own format, which would hold
the engine's GIL for long grammars.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from typing import Any

from tapscope.core.errors import UsageError

MAX_CPU_S = 3
"""CPU time limit per grammar in seconds; most grammars take a few milliseconds."""
MAX_MEMORY = 2 << 30
"""Memory limit of the subprocess in bytes."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Regular expression for whitespace between JSON tokens; bounded, so that a model cannot generate it endlessly."""


class GrammarCompilerProcess:
    """Subprocess that compiles grammars for one thread.

    The subprocess is started on first use, and restarted after a grammar has exceeded a limit.
    """

    def __init__(self, max_cpu_s: int = MAX_CPU_S, max_memory: int = MAX_MEMORY) -> None:
        self._max_cpu_s, self._max_memory = max_cpu_s, max_memory
        self._process: subprocess.Popen[bytes] | None = None

    def form_of(self, kind: str, text: str, special: dict[str, int], marks: dict[str, int]) -> str:
        """Convert a grammar to llguidance's own format; ``special`` and ``marks`` map added tokens to ids.

        Raises UsageError if the grammar is invalid, exceeds a limit, or crashes the subprocess.
        """
        question = [kind, text, special, marks]
        line, code = self._ask(question)
        if not line and code not in (-signal.SIGXCPU, -signal.SIGABRT):  # killed for another reason: retry once
            line, code = self._ask(question)
        if not line:
            limits = {
                -signal.SIGXCPU: f"it takes more than {self._max_cpu_s} s to compile",
                -signal.SIGABRT: f"it takes more than {self._max_memory >> 20} MiB of memory to compile",
            }
            reason = limits.get(code, f"the compiler process ended twice, with exit code {code}")
            raise UsageError(f"{reason}; use a smaller grammar")
        answer = json.loads(line)
        if "error" in answer:
            raise UsageError(answer["error"])
        return str(answer["form"])

    def _ask(self, question: list[Any]) -> tuple[bytes, int]:
        """Send a grammar; return (response line, 0), or (b"", exit code) if the subprocess ended without a response."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return line, 0
        code = process.wait()
        self.close()
        return b"", code

    def close(self) -> None:
        """Kill the subprocess, if any."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", __name__, str(self._max_cpu_s), str(self._max_memory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _llguidance_form(kind: str, text: str, special: dict[str, int], marks: dict[str, int]) -> str:
    import llguidance

    from tapscope.engine.structured_output.ebnf import translate
    from tapscope.engine.structured_output.structural_tag import structural_tag_to_lark

    matcher = llguidance.LLMatcher
    if kind == "structural_tag":
        kind, text = "grammar", structural_tag_to_lark(json.loads(text), special, marks, WHITESPACE)
    if kind == "ebnf":
        translated = translate(text)
        kind, text = ("grammar" if translated.kind == "lark" else translated.kind), translated.text
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "grammar":
        return str(matcher.grammar_from_lark(text))
    schema = json.loads(text)
    if schema is not True and not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object or true")
    schema = {} if schema is True else schema
    return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))


def first_line(text: str) -> str:
    """Return the first line of an error message; for multi-line regex errors, append the line with the reason."""
    first, *rest = text.strip().split("\n")
    return " ".join([first, *(line.removeprefix("error: ") for line in rest if line.startswith("error: "))])


def _try(max_cpu_s: int, question: list[Any]) -> dict[str, Any]:
    import llguidance

    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + max_cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    try:
        form = _llguidance_form(*question)
        if error := llguidance.LLMatcher.validate_grammar(form, None):
            return {"error": first_line(error)}
    except (ValueError, RecursionError, UsageError) as error:
        return {"error": str(error)}
    return {"form": form}


def main() -> None:
    """Entry point of the subprocess: read one grammar per line and write one response per line until stdin closes."""
    max_cpu_s, max_memory = map(int, sys.argv[1:])
    os.nice(10)  # lower priority than the engine's steps
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    for line in sys.stdin.buffer:
        try:
            print(json.dumps(_try(max_cpu_s, json.loads(line))), flush=True)
        except MemoryError:
            os.abort()  # same exit code as when llguidance runs out of memory


if __name__ == "__main__":
    main()
