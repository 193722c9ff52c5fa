"""A manager is asked again what another was asked, and every answer is compared.

- ``recording``: the files, and what may stand in them.
- ``player``: what each word of a recording asks of a manager.
- ``command``: ``pagedattn replay FILE…``.
"""

from pagedattn.replay.command import add_arguments, replay, run
from pagedattn.replay.recording import GROUP_TYPES, RecordingError, read_recording

__all__ = ["GROUP_TYPES", "RecordingError", "add_arguments", "read_recording", "replay", "run"]
