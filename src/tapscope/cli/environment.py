"""Package versions and kernel backends, printed by `tapscope info --env` for bug reports."""

import platform
from importlib import metadata

from tapscope import __version__

PACKAGES = (
    "numpy",
    "polars",
    "rich",
    "safetensors",
    "ml_dtypes",
    "textual",
    "torch",
    "transformers",
    "pyzmq",
    "fastapi",
)


def environment() -> dict[str, str]:
    """Return name -> version or state, without importing any of the packages except numpy (for the native kernels)."""
    from tapscope.kernels.native import backend

    kind, why = backend()
    facts = {
        "tapscope": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    facts |= {name: _version(name) for name in PACKAGES}
    facts["native kernels"] = f"{kind} ({why})"
    return facts


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
