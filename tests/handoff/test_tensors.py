import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from twinhull.errors import ModelRefused, TwinhullError
from twinhull.handoff import tensors

torch = pytest.importorskip("torch")

DTYPES = ["f8", "f4", "f2", "c8", "?", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"]


def back(values, tmp_path):
    tensors.write(tensors.prepared(values), tmp_path / "x")
    return tensors.read((tmp_path / "x").read_bytes())


@given(data=st.data())
def test_an_array_comes_back_equal_whatever_its_dtype_shape_order_and_layout(data, tmp_path_factory):
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES))).newbyteorder(data.draw(st.sampled_from("<>")))
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    value = data.draw(arrays.arrays(dtype, shape))
    value = data.draw(st.sampled_from([value, value.T, value[..., ::-1] if value.ndim else value]))
    found = back({"a": value}, tmp_path_factory.mktemp("x"))["a"]
    np.testing.assert_array_equal(found, value)
    assert found.dtype == value.dtype.newbyteorder("=")
    assert found.flags.writeable


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int64", "int32", "uint8", "bool", "complex64"]
)
def test_a_torch_tensor_comes_back_equal(dtype, tmp_path):
    value = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)).T
    found = back({"a": value, "b": value[0]}, tmp_path)
    torch.testing.assert_close(torch.from_numpy(found["a"]), value)
    torch.testing.assert_close(torch.from_numpy(found["b"]), value[0])


def test_bfloat16_comes_back_as_float32_without_loss(tmp_path):
    value = torch.randn(3, 5).to(torch.bfloat16)
    values = {"a": value, "b": value.T, "c": value[0, 0], "d": value[:0], "e": torch.nn.Parameter(value)}
    found = back(values, tmp_path)
    for name, array in found.items():
        assert array.dtype == np.float32
        torch.testing.assert_close(
            torch.from_numpy(array).to(torch.bfloat16), values[name].data, rtol=0, atol=0
        )
    prepared = tensors.prepared(values)
    assert prepared["b"].described() == {"shape": [5, 3], "dtype": "bfloat16"}


def test_tied_weights_and_parameters_that_learn_are_stored(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    found = back({"a": weight, "b": weight}, tmp_path)
    assert found["a"].tolist() == found["b"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([None]),
        np.array([1.0], dtype=np.longdouble),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.zeros(2, dtype=[("a", "f4")]),
        [1.0],
        1.0,
        None,
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
)
def test_what_is_no_plain_tensor_is_refused_by_name(value):
    with pytest.raises(TwinhullError, match="tensor weight "):
        tensors.prepared({"weight": value})


@pytest.mark.parametrize("name", ["", "__metadata__", 3])
def test_a_name_that_safetensors_keeps_for_itself_is_refused(name):
    with pytest.raises(TwinhullError, match="cannot be called"):
        tensors.prepared({name: np.zeros(1)})


def test_a_model_without_tensors_is_refused():
    with pytest.raises(TwinhullError, match="at least one tensor"):
        tensors.prepared({})


@given(st.binary(max_size=200))
def test_bytes_that_are_no_safetensors_are_refused(data):
    try:
        assert tensors.read(data) == {}
    except ModelRefused as refused:
        assert "safetensors" in str(refused)


def test_numpy_arrays_need_no_torch():
    code = (
        "import sys, numpy; from twinhull.handoff import registry, tensors;"
        "tensors.prepared({'a': numpy.zeros(2)}); print('torch' in sys.modules, 'redis' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]
