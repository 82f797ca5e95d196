"""Replace slow convolutions and poolings of any model by the library's forms of them.

A user's loss is traced, and the program is evaluated with other forms of ``conv_general_dilated``
and of ``reduce_window`` with a maximum or a sum (``max_pool``, ``avg_pool``) and its gradient. So a
model of flax, equinox, haiku or plain JAX runs as fast as one of this package, and its author
changes no line. The forms depend on what the program is traced for (``fedjax_lab.machine.target``).
Where XLA's own operations are as fast, the program stays the same.

Programs are read in JAX's public form (``jax.extend.core``) and written by public functions, with
one exception: ``_with_rule``, for functions that have a derivative of their own.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from fedjax_lab.checks import warn
from fedjax_lab.machine.target import TracedFor, traced_for, tracing_with
from fedjax_lab.models import axis_order, convolution, normalization, pooling, recurrence
from fedjax_lab.models.axis_order import Order, array_of, in_order, order_of, with_order
from fedjax_lab.models.programs import bind, value_of

# Operation -> (its params, its operands, what the program is traced for) -> another form of it, a
# function of the operands; None: the operation stays.
_FORMS: dict[str, Callable[..., Callable[..., Any] | None]] = {
    "conv_general_dilated": convolution.form_of,
    "reduce_window_max": pooling.form_of_max,
    "reduce_window_sum": pooling.form_of_sum,
    "select_and_scatter_add": pooling.form_of_max_transpose,
    "select_and_gather_add": pooling.form_of_max_tangent,
}


def lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with other forms of its convolutions and poolings.

    Values and derivatives are the same up to rounding; without such operations the program is the
    same. Outside a trace it is called as it is: only in a loop are they slow. A loop that
    multiplies its state by a matrix, as recurrent layers do, has no forward-mode derivative
    (``jax.jvp``), but gradients of gradients.

    Args:
      function: pytrees of arrays -> pytree, such as a loss. It may close over arrays, also traced
        ones.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        how = traced_for()
        leaves, structure = jax.tree.flatten((arguments, named))
        may_change = how.convolution != "lax" and how.platform != "tpu"
        if not may_change or not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return function(*arguments, **named)

        def of_leaves(*leaves):
            arguments, named = jax.tree.unflatten(structure, leaves)
            return function(*arguments, **named)

        return _lowered(of_leaves, leaves, how)

    return run


def _has_forms(program: Jaxpr, how: TracedFor) -> bool:
    """Return True if an operation of a program, or of one inside it, takes another form."""
    return any(
        equation.primitive.name == "correlate"
        or _form_of(equation, how) is not None
        or _has_forms_inside(equation, how)
        for equation in program.eqns
    )


def _has_forms_inside(equation: JaxprEqn, how: TracedFor) -> bool:
    if recurrence.is_recurrent(equation):
        return True
    inside = _inside(equation)
    if equation.primitive.name == "custom_vjp_call":
        # A recurrent layer with a derivative of its own, like this package's, stays.
        inside = [program for program in inside if not _is_all_dense(program)]
    return any(_has_forms(program, how) for program in inside)


def _is_all_dense(program: Jaxpr) -> bool:
    """Return True if there is neither a convolution nor a pooling in a program."""
    return not any(
        equation.primitive.name in (*_FORMS, "correlate")
        or not all(map(_is_all_dense, _inside(equation)))
        for equation in program.eqns
    )


def _lowered(function: Callable[..., Any], leaves: Sequence[Any], how: TracedFor) -> Any:
    """Call a function of leaves with other forms of its operations.

    Leaves and results that are no arrays of JAX are handed on. The function is traced once.
    """
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    results: list[Any] = []
    structure: Any = None

    def of_arrays(*arrays):
        nonlocal results, structure
        given = iter(arrays)
        result = function(*(next(given) if a else x for a, x in zip(is_array, leaves, strict=True)))
        results, structure = jax.tree.flatten(result)
        return [leaf for leaf in results if isinstance(leaf, jax.Array)]

    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    with tracing_with("lax"):  # a function inside that is lowered, too, waits for this one
        closed = jax.make_jaxpr(of_arrays)(*arrays)
    _note(closed.jaxpr, how)
    if _has_forms(closed.jaxpr, how):
        found = iter(map(in_order, _evaluate(closed, arrays, how)))
    else:
        found = iter(jaxpr_as_fun(closed)(*arrays))
    merged = [next(found) if isinstance(leaf, jax.Array) else leaf for leaf in results]
    return jax.tree.unflatten(structure, merged)


def _note(program: Jaxpr, how: TracedFor) -> None:
    """Note the convolutions of a program, and warn of those that stay slow."""
    for equation in program.eqns:
        name = equation.primitive.name
        shapes: list[Any] = [v.aval for v in equation.invars]
        if name == "conv_general_dilated":
            kind = convolution.described(equation.params, shapes)
            why_not = convolution.why_not(equation.params, shapes, how)
            if how.notes is not None and why_not:
                how.notes[kind] = f"as jax.lax has it: {why_not}"
            elif how.notes is not None:
                how.notes[kind] = convolution.form_name(equation.params, shapes, how)
            result: Any = equation.outvars[0].aval
            is_slow = result.size and jnp.issubdtype(shapes[0].dtype, jnp.inexact)
            if why_not and is_slow and how.platform == "cpu":
                warn(
                    f"the loss has a convolution ({kind}) for which there is no fast form on CPU: "
                    f"{why_not}. Inside a loop, as local steps are, XLA computes it at least ten "
                    "times slower than other convolutions.",
                )
        for inside in _inside(equation):
            _note(inside, how)


def _form_of(equation: JaxprEqn, how: TracedFor) -> Callable[..., Any] | None:
    form = _FORMS.get(equation.primitive.name)
    if form is None:
        return None
    return form(equation.params, [v.aval for v in equation.invars], how)


def _inside(equation: JaxprEqn) -> list[Jaxpr]:
    """Return the programs inside an equation, such as the body of a loop."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _evaluate(closed: ClosedJaxpr, operands: Sequence[Any], how: TracedFor) -> list[Any]:
    """Evaluate a program with other forms of its operations.

    Returns:
      Arrays, some with an order.
    """
    program = closed.jaxpr
    values: dict[Any, Any] = dict(zip(program.constvars, closed.consts, strict=True))
    values.update(zip(program.invars, operands, strict=True))
    producers = {variable: equation for equation in program.eqns for variable in equation.outvars}

    for equation in program.eqns:
        given = [value_of(variable, values) for variable in equation.invars]
        scope = str(equation.source_info.name_stack)
        with equation.ctx.manager, jax.named_scope(scope) if scope else nullcontext():
            normalized = _normalized(equation, producers, values, how)
            results = _results(equation, given, how) if normalized is None else normalized
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(variable, values) for variable in program.outvars]


def _normalized(
    equation: JaxprEqn,
    producers: Mapping[Any, JaxprEqn],
    values: Mapping[Any, Any],
    how: TracedFor,
) -> list[Any] | None:
    """Evaluate the product with which an image is normalized; None: the equation is none."""
    variables = normalization.operands_of(equation, producers) if _keeps_orders(how) else None
    if variables is None or (order := order_of(values[variables[0]])) is None:
        return None
    arrays = [in_order(value_of(variable, values), order) for variable in variables]
    return [with_order(normalization.centred_and_scaled(*arrays), order)]


def _results(equation: JaxprEqn, given: list[Any], how: TracedFor) -> Sequence[Any]:
    name = equation.primitive.name
    if (form := _form_of(equation, how)) is not None:
        if not _keeps_orders(how):
            return [form(*given)]
        # The form's own transposes, pads and slices take the order of its operands over.
        closed = jax.make_jaxpr(form)(*(variable.aval for variable in equation.invars))
        return _evaluate(closed, given, how)
    if _keeps_orders(how) and (results := axis_order.results_of(equation, given)) is not None:
        return results
    is_ordered = any(map(order_of, given))
    if is_ordered or _has_forms_inside(equation, how):
        if (inside := _INSIDE.get(name)) is not None:
            return inside(equation, given, how)
        if (around := _AROUND.get(name)) is not None:
            return around(equation, list(map(in_order, given)), how)
    return bind(equation, list(map(in_order, given)))


def _keeps_orders(how: TracedFor) -> bool:
    return how.platform == "cpu"


# --- Operations that contain programs, whose operands and results may have an order.


def _jit(equation, given, how):
    with jax.named_scope(equation.params["name"]):
        return _evaluate(equation.params["jaxpr"], given, how)


def _remat(equation, given, how):
    params = equation.params
    inner, orders = _of_arrays(_function(params["jaxpr"], how), given)
    again = jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return list(map(with_order, again(*map(array_of, given)), orders))


def _with_tangent_rule(equation, given, how):
    """Call a ``custom_jvp`` function, with other forms in it and in its rule."""
    params = equation.params
    if params["symbolic_zeros"]:
        return _with_rule(equation, list(map(in_order, given)), how)
    _, rule = equation.primitive.get_bind_params(params)["subfuns"]
    inner, orders = _of_arrays(_function(params["call_jaxpr"], how), given)
    jax.eval_shape(inner, *map(array_of, given))  # finds the orders; gradients call the rule only
    called = jax.custom_jvp(inner)

    @called.defjvp
    def with_tangents(primals, tangents):
        primals, tangents = map(functools.partial(_like, given), (primals, tangents))
        shapes = [variable.aval for variable in equation.invars]
        closed = jax.make_jaxpr(rule.call_wrapped)(*shapes, *shapes)
        results = _evaluate(closed, [*primals, *tangents], how)
        ordered = list(map(in_order, results, orders * 2))
        return ordered[: len(orders)], ordered[len(orders) :]

    return list(map(with_order, called(*map(array_of, given)), orders))


def _of_arrays(function, given):
    """Return a function of arrays as they stand, and its results' orders, known once it ran."""
    orders: list[Order] = []

    def run(*arrays):
        results = function(*_like(given, arrays))
        orders[:] = map(order_of, results)
        return list(map(array_of, results))

    return run, orders


def _like(given, arrays):
    """Return arrays with the orders of ``given``."""
    return list(map(with_order, arrays, map(order_of, given)))


_INSIDE = {
    "jit": _jit,
    "pjit": _jit,
    "remat2": _remat,
    "checkpoint": _remat,
    "custom_jvp_call": _with_tangent_rule,
}

# --- Operations that contain programs. Each is called again by its public function.


def _function(program: ClosedJaxpr | Jaxpr, how: TracedFor) -> Callable[..., list[Any]]:
    closed = program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, [])
    return lambda *operands: _evaluate(closed, operands, how)


def _arrays_of(program: ClosedJaxpr | Jaxpr, how: TracedFor) -> Callable[..., list[jax.Array]]:
    inner = _function(program, how)
    return lambda *operands: list(map(in_order, inner(*operands)))


def _scan(equation, given, how):
    params = equation.params
    num_consts, num_carry = recurrence.num_consts_and_carry(equation)
    consts, carry = given[:num_consts], given[num_consts : num_consts + num_carry]
    inner = _arrays_of(params["jaxpr"], how)
    if recurrence.is_recurrent(equation):
        flat = jax.make_jaxpr(inner)(*(v.aval for v in params["jaxpr"].jaxpr.invars))
        return recurrence.scan(equation, given, flat)

    def body(carry, xs):
        results = inner(*consts, *carry, *xs)
        return results[:num_carry], results[num_carry:]

    carry, results = lax.scan(
        body,
        carry,
        given[num_consts + num_carry :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *results]


def _while(equation, given, how):
    params = equation.params
    if params["cond_jaxpr"].out_avals[0].shape:  # of ``vmap``; ``while_loop`` takes no such one
        return bind(equation, given)
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = given[:of_cond], given[of_cond : of_cond + of_body]
    condition = _arrays_of(params["cond_jaxpr"], how)
    body = _arrays_of(params["body_jaxpr"], how)
    return lax.while_loop(
        lambda carry: condition(*cond_consts, *carry)[0],
        lambda carry: body(*body_consts, *carry),
        given[of_cond + of_body :],
    )


def _cond(equation, given, how):
    params = equation.params
    if params.get("branches_platforms"):  # ``switch`` would compile those of other platforms, too
        return bind(equation, given)
    branches = [_arrays_of(branch, how) for branch in params["branches"]]
    return lax.switch(given[0], branches, *given[1:])


def _shard_map(equation, given, how):
    params = equation.params
    inner = _arrays_of(params["jaxpr"], how)
    return jax.shard_map(
        lambda *operands: tuple(inner(*operands)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )(*given)


def _with_rule(equation, given, how):
    """Bind a ``custom_jvp`` or ``custom_vjp`` function again, with other forms in all its parts."""
    primitive, params = equation.primitive, equation.primitive.get_bind_params(equation.params)
    functions = params.pop("subfuns")

    def with_forms(function):
        def run(*leaves):
            return _lowered(function.call_wrapped, leaves, how)

        return linear_util.wrap_init(run, debug_info=function.debug_info)

    return primitive.bind(*given, subfuns=tuple(map(with_forms, functions)), **params)


_AROUND = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_vjp_call": _with_rule,
}
