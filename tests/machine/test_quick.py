"""Garbage collection pauses while a round is traced."""

import gc

import pytest

from fedjax_lab.machine.quick import without_collection


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_pauses_for_a_call_and_is_then_as_before(was_on):
    @without_collection()
    def fails():
        assert not gc.isenabled()
        raise ArithmeticError

    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ArithmeticError):
            fails()
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
