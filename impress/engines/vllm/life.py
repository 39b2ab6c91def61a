"""What the saver knows of one request."""

from __future__ import annotations

from impress.engines.vllm.tracked import whole_of
from impress.write.writer import Writer


class Life:
    """The stores of one request between its start, or preemption, and its end."""

    def __init__(self, request_id: str, root: bytes) -> None:
        self.request_id = request_id
        self.whole = whole_of(request_id)
        self.root = root  # of what its prompt begins with (Saver._root)
        self.writer: Writer | None = None
        self.n_asked = 0  # tokens of the prompt last begun
        self.n_wanted = 0  # those of them that are admitted: the writer's prompt
        self.n_put = 0
        self.n_waiting = 0  # specs
        self.waits_since = 0.0  # since when at least one of them waits
        self.dropped = False  # its blocks now belong to another
        self.ended = False  # nothing more will be offered

    @property
    def waits(self) -> bool:
        """Whether its blocks are still to be read."""
        return self.n_waiting > 0 and not self.dropped
