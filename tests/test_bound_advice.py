"""What the error that nothing can fit advises."""

from __future__ import annotations

import pytest

from hetspmd.errors import MemoryBoundError


@pytest.mark.parametrize(("activations", "helps"), [(900, True), (100, False)])
def test_fewer_activations_are_advised_only_where_the_rest_has_room(activations: int, helps: bool) -> None:
    parts = {"parameters": 400, "optimizer state": 800, "gradients": 400, "activations": activations}
    room = 2000 if helps else 1500
    text = str(MemoryBoundError(parts, room, [("a", room)], micro_batches={}, enough=None))
    assert ("recompute='auto'" in text) == helps
    assert ("smaller batch" in text) == helps
    assert "dd devices or memory" in text
