from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.testing
import pytest

from twinhull.serve import wire


@dataclass
class Row:
    user: int
    taste: np.ndarray


def test_a_batch_comes_back_with_its_arrays():
    batch = wire.Batch(b"7", "rank", "replies", 12.5, [Row(3, np.arange(6, dtype="f4").reshape(2, 3))], 1)
    back = wire.decode_batch(wire.encode(batch))
    row = wire.fit(back.rows[0], Row)
    assert (back.id, back.task, back.reply_to, back.deadline, back.outputs) == (
        b"7",
        "rank",
        "replies",
        12.5,
        1,
    )
    assert row.user == 3
    assert row.taste.dtype == np.float32
    numpy.testing.assert_array_equal(row.taste, [[0, 1, 2], [3, 4, 5]])


def test_an_array_that_has_travelled_can_be_written_to():
    array = wire.decode(wire.encode(np.zeros(3)))
    array[0] = 1.0
    assert array.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("array", [np.zeros(0), np.zeros((2, 0)), np.array(1.5), np.array(["a", "bc"])])
def test_odd_arrays_travel(array: np.ndarray):
    back = wire.decode(wire.encode(array))
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    numpy.testing.assert_array_equal(back, array)


def test_a_transposed_array_travels_as_it_looks():
    array = np.arange(6).reshape(2, 3).T
    numpy.testing.assert_array_equal(wire.decode(wire.encode(array)), array)


def test_a_sealed_row_passes_through_a_gateway_untouched():
    reply = wire.Reply(b"7", [{"taste": np.ones(2)}, None], {1: "ValueError: no"}, 4, 0.1)
    sealed = wire.decode_sealed(wire.encode(reply))
    batch = wire.decode_batch(wire.encode(wire.Batch(b"8", "rank", "replies", 1.0, [sealed.rows[0]], 1)))
    numpy.testing.assert_array_equal(batch.rows[0]["taste"], [1.0, 1.0])
    assert (sealed.errors, sealed.model_version) == ({1: "ValueError: no"}, 4)


def test_an_array_of_objects_cannot_travel():
    with pytest.raises(TypeError, match="Python objects"):
        wire.encode(np.array([object()]))


def test_what_is_no_data_cannot_travel():
    with pytest.raises(TypeError, match="a object cannot travel"):
        wire.encode(object())


def test_a_forged_array_of_objects_is_refused():
    forged = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("|O", (1,), b"12345678")))
    with pytest.raises(ValueError, match="not accepted"):
        wire.decode(msgspec.msgpack.encode(forged))


def test_a_newer_format_is_refused():
    newer = msgspec.msgpack.encode((wire.FORMAT + 1, b"7", "rank", "replies", 1.0, []))
    with pytest.raises(msgspec.ValidationError, match="Invalid value 2"):
        wire.decode_batch(newer)


def test_a_pickle_is_no_batch():
    with pytest.raises(msgspec.MsgspecError):
        wire.decode_batch(b"\x80\x05K\x01.")


def test_arrays_become_lists_in_json():
    assert (
        wire.to_json({"scores": np.array([1.5, 2.5]), "best": np.int64(3)})
        == b'{"scores":[1.5,2.5],"best":3}'
    )
