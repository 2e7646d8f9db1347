"""Every error a user can cause, in one tree; the message always names the cure.

    DFlashError
    ├── ConfigError          an option, a YAML key or a request parameter is wrong
    ├── DataError            a prompts, answers or data-set file cannot be used
    ├── PromptError          a prompt the target cannot take (too long, empty)
    ├── ModelError           a target or draft cannot be found, read or run
    │   ├── UnsupportedModel     a model that this version cannot decode losslessly
    │   ├── CheckpointError      a draft or training checkpoint that is damaged or contradicts itself
    │   └── PairError            a draft that does not belong to this target
    ├── EngineError          a serving engine that does not start, or ends by itself
    └── MissingExtra         an optional package is needed; the message gives the install command

The command line turns each of them into one line on standard error and exit code 2. Violations of our
own invariants are `assert` and never reach this tree.
"""


class DFlashError(Exception):
    """Base of all errors that the user can mend; `str(error)` says what is wrong and what to do."""


class ConfigError(DFlashError):
    """An option, configuration key or request parameter is invalid."""


class DataError(DFlashError):
    """A file of prompts, answers or evaluation questions cannot be used."""


class PromptError(DFlashError):
    """A prompt that the target cannot take."""


class ModelError(DFlashError):
    """A target or draft cannot be found, read or run."""


class UnsupportedModel(ModelError):
    """A model that cannot be decoded losslessly by this version."""


class CheckpointError(ModelError):
    """A draft or training checkpoint that is damaged or contradicts itself."""


class PairError(ModelError):
    """A draft that does not belong to this target."""


class EngineError(DFlashError):
    """A serving engine does not start, or ended by itself."""


class MissingExtra(DFlashError):
    """An optional package is not installed."""
