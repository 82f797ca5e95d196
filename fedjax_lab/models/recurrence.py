"""Loops over the steps of a sequence whose products with weights are computed once for all steps.

A recurrent layer, as ``flax.linen.RNN`` or ``lax.scan`` has it, multiplies each step's inputs and
state by weights that stay the same. Its gradient then adds a product of the size of the weights at
every step, and the inputs' products are small where one large one would do. Here

- what depends on weights only, such as their concatenation, is computed before the loop;
- products of a step's inputs and weights are computed for all steps at once;
- the gradient of weights that multiply the state is one product over all steps, after the loop;
- on a CPU, a matrix that multiplies the state is stored transposed, too. XLA reads a matrix across
  its rows in each step of the gradient else, which takes up to three times as long.

There is no forward-mode derivative of such a loop.

Axes: T steps of a loop.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fedjax_lab.machine.layout import written_out
from fedjax_lab.machine.target import traced_for
from fedjax_lab.models.programs import bind, value_of

# What a value in the body of a loop depends on.
_WEIGHTS, _INPUTS, _STATE = range(3)


def num_consts_and_carry(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many operands of a ``scan`` stay the same, and how many are its state."""
    params = equation.params
    if "ft_in" in params:  # since JAX 0.11
        num_consts, num_carry = map(len, params["ft_in"].elts[:2])
        return num_consts, num_carry
    return params["num_consts"], params["num_carry"]


def is_recurrent(equation: JaxprEqn) -> bool:
    """Return True if an operation is a loop that multiplies its state by weights."""
    if equation.primitive.name != "scan":
        return False
    program = equation.params["jaxpr"].jaxpr
    num_consts, num_carry = num_consts_and_carry(equation)
    return _multiplies_state(program, _levels_in(program, num_consts, num_carry))


def _levels_in(program: Jaxpr, num_consts: int, num_carry: int) -> list[int]:
    num_xs = len(program.invars) - num_consts - num_carry
    return [_WEIGHTS] * num_consts + [_STATE] * num_carry + [_INPUTS] * num_xs


def _multiplies_state(program: Jaxpr, levels: Sequence[int]) -> bool:
    """Return True if there is such a product, also in functions with ``jit``."""
    level = _levels(program, levels)
    for equation in program.eqns:
        own = [level(variable) for variable in equation.invars]
        if _is_product(equation) and sorted(own) == [_WEIGHTS, _STATE]:
            return True
        is_call = equation.primitive.name in ("jit", "pjit")
        if is_call and _multiplies_state(equation.params["jaxpr"].jaxpr, own):
            return True
    return False


def _levels(program: Jaxpr, levels: Sequence[int]) -> Callable[[Any], int]:
    """Return a function that says on what a variable of the body depends."""
    found: dict[Any, int] = dict.fromkeys(program.constvars, _WEIGHTS)
    found.update(zip(program.invars, levels, strict=True))

    def level(variable: Any) -> int:
        return _WEIGHTS if isinstance(variable, Literal) else found[variable]

    for equation in program.eqns:
        own = _STATE if equation.effects else max(map(level, equation.invars), default=_WEIGHTS)
        found.update(dict.fromkeys(equation.outvars, own))
    return level


def _is_product(equation: JaxprEqn) -> bool:
    """Return True for a product of floats without axes that both operands share."""
    if equation.primitive.name != "dot_general":
        return False
    _, batch = equation.params["dimension_numbers"]
    result: Any = equation.outvars[0].aval
    is_float = jnp.issubdtype(result.dtype, jnp.floating)
    return is_float and not any(batch)


class _Product(NamedTuple):
    """A product of the state and weights.

    Attributes:
      equation: the operation.
      weights: the variable of the weights.
      place: which operand the weights are.
    """

    equation: JaxprEqn
    weights: Any
    place: int

    def of_all_steps(self, others: jax.Array, weights: jax.Array) -> jax.Array:
        """Compute the product for all steps: others [T, ...] -> [T, ...]."""
        (left, right), _ = self.equation.params["dimension_numbers"]
        params = self.equation.params
        named = {name: params[name] for name in ("precision", "preferred_element_type")}
        if self.place == 1:
            numbers = ((tuple(axis + 1 for axis in left), right), ((), ()))
            return lax.dot_general(others, weights, numbers, **named)
        numbers = ((left, tuple(axis + 1 for axis in right)), ((), ()))
        product = lax.dot_general(weights, others, numbers, **named)
        return jnp.moveaxis(product, weights.ndim - len(left), 0)

    @property
    def is_of_matrix(self) -> bool:
        """True if the weights are a matrix, of one dtype with the state and the result."""
        (left, _), _ = self.equation.params["dimension_numbers"]
        shapes: list[Any] = [v.aval for v in (*self.equation.invars, *self.equation.outvars)]
        is_matrix = shapes[self.place].ndim == 2 and len(left) == 1
        return is_matrix and len({shape.dtype for shape in shapes}) == 1

    def matrices(self, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights of a matrix product, [K, F], and their transpose, both stored."""
        contracted = self.equation.params["dimension_numbers"][0][self.place]
        given, turned = weights, written_out(weights.T)
        return (given, turned) if contracted == (0,) else (turned, given)

    def of_one_step(self, other: jax.Array, weights: jax.Array, turned: jax.Array) -> jax.Array:
        """Compute the product for one step, whose gradient reads the transposed matrix.

        Args:
          weights, turned: as ``matrices`` returns them.
        """
        contracted = self.equation.params["dimension_numbers"][0][1 - self.place]
        result = self._times(jnp.moveaxis(other, contracted[0], -1), weights, turned)
        return jnp.moveaxis(result, -1, 0) if self.place == 0 else result

    def _times(self, other, weights, turned):
        """Multiply [..., K] and [K, F]."""

        def product(left, right):
            with self.equation.ctx.manager:
                return jnp.matmul(left, right, precision=self.equation.params["precision"])

        times = jax.custom_vjp(lambda other, weights, turned: product(other, weights))
        times.defvjp(
            lambda other, weights, turned: (product(other, weights), turned),
            lambda turned, to: (product(to, turned), None, None),
        )
        return times(other, weights, turned)


def scan(equation: JaxprEqn, operands: Sequence[jax.Array], body: ClosedJaxpr) -> list[jax.Array]:
    """Evaluate a ``scan`` for which ``is_recurrent`` holds.

    Args:
      body: its body, without functions inside.
    """
    program = body.jaxpr
    num_consts, num_carry = num_consts_and_carry(equation)
    level = _levels(program, _levels_in(program, num_consts, num_carry))
    values = dict(zip(program.constvars, body.consts, strict=True))
    values.update(zip(program.invars[:num_consts], operands[:num_consts], strict=True))

    of_weights = [e for e in program.eqns if _level_of(e, level) == _WEIGHTS]
    _run(of_weights, values)
    of_inputs = _inputs_of_products(program, level)
    done = {id(e) for e in (*of_weights, *of_inputs)}
    rest = [e for e in program.eqns if id(e) not in done]

    after_carry = num_consts + num_carry
    of_carry = program.invars[num_consts:after_carry]
    xs = _paired(program.invars[after_carry:], operands[after_carry:])
    if of_inputs:
        xs.update(_of_all_steps(of_inputs, _read(rest, program.outvars), xs, values))
    products = [
        _Product(e, e.invars[place], place)
        for e in rest
        if _is_product(e)
        for place in (0, 1)
        if level(e.invars[place]) == _WEIGHTS and level(e.invars[1 - place]) == _STATE
    ]
    own = {id(product.equation) for product in products}
    # Weights that anything else reads have a gradient from there, too: the loop's own.
    elsewhere = _read([e for e in rest if id(e) not in own], program.outvars)
    products = [product for product in products if product.weights not in elsewhere]
    of_products = dict.fromkeys(product.weights for product in products)
    read = _read(rest, program.outvars)
    weights = {v: values[v] for v in of_products}
    others = {v: values[v] for v in read if v in values and v not in of_products}
    carry = list(operands[num_consts:after_carry])
    return _looped(
        rest, products, equation.params, of_carry, program.outvars, weights, others, xs, carry
    )


def _looped(equations, products, params, of_carry, results, weights, others, xs, carry):
    """Run what is left of a loop.

    Args:
      products: those that multiply the state by weights.
      results: the variables of the state after a step, and of the step's results.
    """
    of_weights, of_others, of_xs = [*weights], [*others], [*xs]
    weights, others, xs = ([*of.values()] for of in (weights, others, xs))
    length, num_carry = params["length"], len(of_carry)
    on_cpu = traced_for().platform == "cpu"
    is_stored_twice = [on_cpu and product.is_of_matrix for product in products]

    def steps(weights, others, carry, xs, offsets):
        """The loop, with an offset added to each product; also returns their operands."""
        fixed = {**_paired(of_weights, weights), **_paired(of_others, others)}
        stored = [
            product.matrices(fixed[product.weights]) if turns else None
            for product, turns in zip(products, is_stored_twice, strict=True)
        ]

        def step(carry, x):
            x, offsets = x
            values = {**fixed, **_paired(of_carry, carry), **_paired(of_xs, x)}
            met = _run(equations, values, products, stored, offsets)
            after = [value_of(variable, values) for variable in results]
            return after[:num_carry], (after[num_carry:], met)

        carry, (ys, met) = lax.scan(
            *(step, carry, (xs, offsets)),
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return (carry, ys), met

    @jax.custom_vjp
    def looped(weights, others, carry, xs):
        return steps(weights, others, carry, xs, None)[0]

    def forward(weights, others, carry, xs):
        shapes: list[Any] = [product.equation.outvars[0].aval for product in products]
        offsets = [jnp.zeros((length, *shape.shape), shape.dtype) for shape in shapes]
        result, back, met = jax.vjp(
            functools.partial(steps, weights), others, carry, xs, offsets, has_aux=True
        )
        return result, (back, met, weights)

    def backward(residuals, gradient):
        back, met, weights = residuals
        of_the_others, of_the_carry, of_the_xs, of_products = back(gradient)
        totals = {v: jnp.zeros_like(array) for v, array in _paired(of_weights, weights).items()}
        for product, other, to in zip(products, met, of_products, strict=True):
            of_all = functools.partial(product.of_all_steps, other)
            (part,) = jax.linear_transpose(of_all, totals[product.weights])(to)
            totals[product.weights] += part
        return [*totals.values()], of_the_others, of_the_carry, of_the_xs

    looped.defvjp(forward, backward)
    carry, ys = looped(weights, others, carry, xs)
    return [*carry, *ys]


def _paired(names: Iterable[Any], values: Iterable[Any]) -> dict[Any, Any]:
    return dict(zip(names, values, strict=True))


def _run(equations, values, products=(), stored=(), offsets=None):
    """Evaluate operations into ``values``; returns the states that the products multiply.

    Args:
      products: products of the state that are among the operations.
      stored: the ``matrices`` of each; None: it is computed as the program has it.
      offsets: what is added to each; None: nothing.
    """
    number = {id(product.equation): i for i, product in enumerate(products)}
    met: list[Any] = [None] * len(products)
    for equation in equations:
        i = number.get(id(equation))
        given = [value_of(variable, values) for variable in equation.invars]
        results: Sequence[Any]
        if i is not None:
            met[i] = given[1 - products[i].place]
        if i is not None and stored[i] is not None:
            results = [products[i].of_one_step(met[i], *stored[i])]
        else:
            with equation.ctx.manager:
                results = bind(equation, given)
        if i is not None and offsets is not None:
            results = [results[0] + offsets[i]]
        values.update(zip(equation.outvars, results, strict=True))
    return met if offsets is not None else None


def _level_of(equation: JaxprEqn, level: Callable[[Any], int]) -> int:
    return max(map(level, equation.outvars), default=_STATE)


def _read(equations: Iterable[JaxprEqn], results: Iterable[Any]) -> dict[Any, None]:
    """Return the variables that operations and results read, always in the same order."""
    read = [v for equation in equations for v in equation.invars] + list(results)
    return dict.fromkeys(v for v in read if not isinstance(v, Literal))


def _inputs_of_products(program: Jaxpr, level: Callable[[Any], int]) -> list[JaxprEqn]:
    """Return the products of a step's inputs and weights, and what they are computed from."""
    needed: set[Any] = set()
    found = []
    for equation in reversed(program.eqns):
        if _level_of(equation, level) != _INPUTS:
            continue
        own = [level(variable) for variable in equation.invars]
        is_product = _is_product(equation) and sorted(own) == [_WEIGHTS, _INPUTS]
        if is_product or needed.intersection(equation.outvars):
            found.append(equation)
            needed.update(_read([equation], []))
    return found[::-1]


def _of_all_steps(equations, read, xs, values):
    """Evaluate operations for all steps at once; returns {variable that is read: [T, ...]}."""
    made = [v for equation in equations for v in equation.outvars if v in read]

    def one(*inputs):
        own = {**values, **_paired(xs, inputs)}
        _run(equations, own)
        return [own[v] for v in made]

    return _paired(made, jax.vmap(one)(*xs.values()))
