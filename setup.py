"""Builds the C++ kernels on all cores; everything else is declared in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class ParallelBuild(build_ext):
    """Compiles the files of an extension in parallel, and again if any header has changed.

    Where there is no compiler nothing is built, and the installation goes on (`optional` below).
    """

    def build_extension(self, ext: Extension) -> None:
        """Compile and link."""
        ext.depends = sorted(map(str, Path(ext.sources[0]).parent.glob("*.h")))
        compile_in_order = self.compiler.compile

        def compile_at_once(sources: list[str], **how: object) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                return list(chain.from_iterable(pool.map(lambda source: compile_in_order([source], **how), sources)))

        self.compiler.compile = compile_at_once
        super().build_extension(ext)


NATIVE = Path("src/tapscope/kernels/native")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fvisibility=hidden",
]

if __name__ == "__main__":  # tests read the flags
    # Without a compiler nothing is built: the numpy fallback then serves, and `tapscope info --env` reports it.
    kernels = Extension(
        "tapscope.kernels.native._tapscope",
        sources=sorted(map(str, NATIVE.glob("*.cpp"))),
        language="c++",
        extra_compile_args=FLAGS,
        optional=True,
    )
    setup(ext_modules=[kernels], cmdclass={"build_ext": ParallelBuild})
