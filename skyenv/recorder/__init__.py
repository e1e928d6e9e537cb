"""Records any agent program as a policy: an OpenAI- and Anthropic-compatible endpoint that keeps exact token ids.

`Recorder` serves sessions; a session's calls become the segments of one trajectory. Nothing of an agent is changed but
the URL and the key that it is started with.
"""

from skyenv.recorder.server import Recorder
from skyenv.recorder.session import RecordedSession

__all__ = ["RecordedSession", "Recorder"]
