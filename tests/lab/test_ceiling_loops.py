"""The loops that measure memory and processor do all that they are timed for."""

from __future__ import annotations

import numpy as np
import pytest

from gemmule_lab.ceilings.loops import STEP_BYTES, copy_loop, read_loop


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("streams", [1, 2])
def test_every_word_is_read(streams: int, lanes: int) -> None:
    """What a sum does not depend on, the compiler need not load."""
    length = 2 * STEP_BYTES
    words, read = np.zeros(2 * streams * length // 8, np.int64), read_loop(streams, lanes)
    for i in range(len(words)):
        words[i] = 1
        assert read(words.ctypes.data, 0, length, streams * length, 2) == 1, i
        words[i] = 0


@pytest.mark.parametrize("streaming", [False, True])
def test_every_word_is_copied(streaming: bool) -> None:
    length = 2 * STEP_BYTES
    memory = np.zeros(4 * length // 8 + 8, np.int64)
    words = memory[-memory.ctypes.data % 64 // 8 :][: 4 * length // 8]
    words[: 2 * length // 8] = np.arange(1, 2 * length // 8 + 1)
    copy_loop(streaming)(words.ctypes.data, 2 * length, length, length, 2)
    np.testing.assert_array_equal(words[2 * length // 8 :], words[: 2 * length // 8])
