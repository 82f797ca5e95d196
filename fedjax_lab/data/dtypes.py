"""The dtypes that arrays have on a device."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.types import PyTree

_PIECE = 2**23  # bytes that are read or converted at once


def unmixed(values: Any) -> np.ndarray:
    """Convert to an array; a list with text is one of objects: NumPy makes text of all beside it.

    Args:
      values: an array, or what NumPy converts to one.
    """
    array = np.asarray(values)
    is_list = isinstance(values, list | tuple)
    return np.array(values, object) if is_list and array.dtype.kind in "US" else array


def stored_dtype(name: str, array: np.ndarray) -> np.dtype:
    """Return the dtype that an array has on a device: 32 bits in place of 64, in native byte order.

    Raises:
      ValueError: it is not numeric, has masked values, is longer than 64 bits (long double), or has
        numbers that do not fit.
    """
    dtype = native(array.dtype)
    if np.ma.is_masked(array):
        raise ValueError(
            f"{name} has an array with masked values; fill them or leave their examples out."
        )
    if dtype.kind in "fc" and dtype.itemsize > 8 * (1 + (dtype.kind == "c")):
        raise ValueError(
            f"{name} has an array of dtype {dtype}, which no device has; convert it, for example "
            "by array.astype(np.float64)."
        )
    # Those of ml_dtypes, such as bfloat16, have the kind "V".
    if dtype.kind not in "biufcV" or (dtype.kind == "V" and not jnp.issubdtype(dtype, jnp.number)):
        hint = " Convert numbers, for example by array.astype(np.float32)." * (dtype.kind == "O")
        hint += " Replace each text by a number, the same in all arrays." * (dtype.kind in "OSTU")
        raise ValueError(f"{name} has an array of dtype {dtype}; it must be numeric.{hint}")
    stored = jax.dtypes.canonicalize_dtype(dtype)
    if dtype.kind in "iu" and stored != dtype and array.size:
        limits = np.iinfo(stored)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(
                f"{name} has integers from {array.min()} to {array.max()}; they must fit into "
                f"{stored}."
            )
    if (
        dtype in (np.float64, np.complex128)
        and stored != dtype
        and not isinstance(array, np.memmap)
    ):
        check_float32(name, array)
    return stored


def check_float32(name: str, array: np.ndarray) -> None:
    """Check that finite numbers, of complex ones both parts, are finite in float32.

    Raises:
      ValueError: a number is too large.
    """
    for piece in pieces(array):
        if np.iscomplexobj(piece):
            piece = np.stack([piece.real, piece.imag])
        large = piece[np.isfinite(piece) & (np.abs(piece) > np.finfo(np.float32).max)]
        if large.size:
            raise ValueError(
                f"{name} has the value {large[0]:.3g}; it must fit into float32, which holds "
                f"numbers up to {np.finfo(np.float32).max:.3g}."
            )


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield parts along the leading axis of some megabytes each."""
    array = np.atleast_1d(array)
    rows = max(1, _PIECE // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def common_length(name: str, tree: PyTree) -> int:
    """Return the length n of the first axis of all leaves.

    Raises:
      ValueError: leaves have different lengths, a leaf is a scalar, or there is none.
    """
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if len(lengths) != 1 or () in lengths:
        hint = " (and each leaf an array, not a list of numbers)" if () in lengths else ""
        raise ValueError(
            f"{name} has leaves with leading axes {sorted(lengths)}; all must be equal, the number "
            f"of examples{hint}."
        )
    ((n,),) = lengths
    return n


def native(dtype: np.dtype) -> np.dtype:
    """Return a dtype in the machine's byte order; files of FITS or netCDF 3 have the other one."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def to_native(array: np.ndarray) -> np.ndarray:
    """Convert an array to the machine's byte order; without a copy if it has it."""
    return array.astype(native(array.dtype), copy=False)


def to_device(name: str, array: Any, *, copy: bool = False) -> jax.Array:
    """Put numbers on the device, in the dtype of ``stored_dtype``.

    Args:
      array: [...], on the host or on a device.
      copy: whether the result never shares memory with ``array``.

    Raises:
      ValueError: as ``stored_dtype``.
    """
    if not isinstance(array, jax.Array):
        array = np.asanyarray(array)  # masks stay
        stored_dtype(name, array)
        array = to_native(array)
    return jnp.array(array, copy=True) if copy else jnp.asarray(array)
