"""The hierarchy of all errors that tapscope raises on purpose.

    TapscopeError
    ├── UsageError               exit 2: invalid arguments
    │   ├── ConfigError          a setting: names field, value and rule
    │   ├── MissingExtraError    an optional package is not installed; also an ImportError
    │   ├── RuleError            a selection rule that is wrong or matches no site
    │   ├── ExpressionError      a condition that does not parse or is not allowed
    │   ├── SiteError            a site that does not parse
    │   ├── DimsError            a dims annotation that does not parse or fit
    │   ├── RunExistsError       the run directory is taken and --force was not given
    │   ├── ListenError          an address that cannot be listened on
    │   ├── RequestError         an invalid field of a served request; carries the field and a machine-readable code
    │   └── StepError            step() nested, or closed twice
    ├── EvaluationError          a condition that cannot be evaluated for these values; counted, not raised into a model
    ├── InvariantError           a bug in tapscope found by a self-check; the message gives the inconsistent values
    ├── DataError                exit 3: data on disk cannot be used
    │   ├── RunNotFoundError     no run at this path
    │   ├── RunVersionError      written by a newer format version
    │   ├── RunCorruptError      inconsistent bytes or lines
    │   ├── CheckpointError      a model directory that is missing, truncated or unknown
    │   └── NothingInCommonError two runs without any comparable row
    ├── OutputError              exit 3: the output of a command cannot be written
    ├── OutOfMemoryError         exit 3: a step of the engine does not fit into memory; also a MemoryError
    └── LiveError                exit 4: a live peer
        ├── UnreachableError     nothing answers at this address
        ├── RecorderError        the recorder died or refused
        ├── RankLostError        a rank died or did not answer in time
        └── OverloadedError      a server has no capacity for the request now; retry later

Each message is one sentence: what is wrong, where, and what would work.
"""


class TapscopeError(Exception):
    """Base of every error tapscope raises on purpose."""

    exit_code = 1


class UsageError(TapscopeError):
    """Invalid arguments or settings."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is invalid; the message names the field, the value and the rule."""


class MissingExtraError(UsageError, ImportError):
    """An optional package is not installed; the message names the extra that provides it."""


class RuleError(UsageError):
    """A selection rule is invalid or matches no site."""


class ExpressionError(UsageError):
    """A condition does not parse or uses disallowed syntax; the message gives the column."""


class SiteError(UsageError):
    """A site does not parse."""


class DimsError(UsageError):
    """A dims annotation does not parse or does not fit the tensor."""


class RunExistsError(UsageError):
    """The run directory exists, and overwriting was not requested."""


class ListenError(UsageError):
    """An address cannot be listened on."""


class RequestError(UsageError):
    """A field of a request is invalid or unsupported."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """``param`` is the name of the field; ``code`` is a stable identifier for programs, as in OpenAI's errors."""
        super().__init__(message)
        self.param = param
        self.code = code


class StepError(UsageError):
    """A step was nested, or closed twice."""


class EvaluationError(TapscopeError):
    """A condition could not be evaluated for the given values; the caller counts it."""


class InvariantError(TapscopeError):
    """An internal invariant does not hold: a bug, never the user's mistake."""


class DataError(TapscopeError):
    """Data on disk cannot be used."""

    exit_code = 3


class RunNotFoundError(DataError):
    """No run exists at this path."""


class RunVersionError(DataError):
    """The run was written by a newer format version."""


class RunCorruptError(DataError):
    """Bytes or lines of a run are inconsistent."""


class CheckpointError(DataError):
    """A model directory is missing, truncated or of an unknown architecture."""


class NothingInCommonError(DataError):
    """Two runs have no comparable row."""


class OutputError(TapscopeError):
    """The output of a command cannot be written, e.g. because the disk is full."""

    exit_code = 3


class OutOfMemoryError(TapscopeError, MemoryError):
    """A step of the engine does not fit into the free memory; the message names the settings to lower."""

    exit_code = 3


class LiveError(TapscopeError):
    """A live process or server failed, refused or did not answer."""

    exit_code = 4


class UnreachableError(LiveError):
    """No response from this address."""


class RecorderError(LiveError):
    """The recorder died or refused."""


class RankLostError(LiveError):
    """A rank died or did not answer within its time limit."""


class OverloadedError(LiveError):
    """A server has no capacity for the request now; retry later."""
