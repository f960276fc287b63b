"""Remote: runs, dumps and checkpoints at an fsspec URL (``s3://``, ``gs://``, ``hdfs://``, ``memory://``, …).

Payloads of ``.safetensors`` files are never stored on disk: byte ranges are read when tensors are compared and dropped
afterwards, apart from a cache of 256 MiB for small reads. Memory is therefore bounded by the tensors in use, and a run
of terabytes needs no disk space. Metadata (``run.json``, ``records.jsonl``, headers) is copied to a temporary
directory, where segments are sparse files of the original size. ``.pt``, ``.npz`` and ``.npy`` files are copied whole,
because locating their tensors requires reading all parts of the file.

Mapping a local copy would need as much disk space as the run, and fsspec's ``simplecache`` reads whole files for a
single tensor.
"""

from tapscope.remote.remote_path import RemotePath, path_of, url_of
from tapscope.remote.remote_run import open_remote, require_remote

__all__ = ["RemotePath", "open_remote", "path_of", "require_remote", "url_of"]
