"""Remote: runs, dumps and checkpoints at an fsspec URL (``s3://``, ``gs://``, ``hdfs://``, ``memory://``, …).

Nothing that holds values of a ``.safetensors`` file is stored: its bytes are read by ranges when they are compared, and
are kept in memory only while they are, apart from the last 256 MiB of small reads. So memory is bounded by
the tensors in use, and no disk is needed for a run of terabytes. What describes the values (``run.json``,
``records.jsonl``, headers) is copied to a temporary directory, in which segments are empty files of the right size;
``.pt``, ``.npz`` and ``.npy`` files are copied whole, because their tensors are found by reading all of their parts.

A memory map of a local copy would need as much disk as the run has, and each map of ``simplecache`` reads whole files
for one tensor.
"""

from tapscope.remote.remote_path import RemotePath, path_of, url_of
from tapscope.remote.remote_run import open_remote, require_remote

__all__ = ["RemotePath", "open_remote", "path_of", "require_remote", "url_of"]
