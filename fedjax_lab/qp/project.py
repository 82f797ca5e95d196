"""The quadratic program of GradMA: the nearest vector with no negative inner product.

GradMA: Gradient-Memory-based Accelerated Federated Learning with Alleviated Catastrophic
Forgetting (Luo et al., CVPR 2023), its QP and the dual of it (after GEM, Lopez-Paz and
Ranzato, NeurIPS 2017). p and the C rows M_c are vectors of d numbers, rho is the margin::

    primal   min_q  1/2 ||q - p||^2    such that  <q, M_c> >= rho ||p|| ||M_c||  for all c
    dual     min_z  1/2 z' G z + b' z  such that  z >= 0,  G = M'M,  b = M'p - rho ||p|| ||M||
    then     q = p + M z

The dual is solved on G and b, C x C, by Lawson and Hanson's method (Solving Least Squares Problems,
1974). The row that q violates most enters the support. Then z moves to the point where r = Gz + b
is 0 on the support, and a row whose z becomes negative on the way leaves. Each row that enters or
leaves takes one sweep (Goodnight, Am. Stat. 1979), a rank-one update of a C x C matrix. This matrix
holds the inverse on the support and the distances of the other rows from its span, which show
whether a row depends on the support. A step that changes no row is a refinement.

So the program is one loop of elementwise operations and sums, without a factorisation. It compiles
fast on every platform, and takes about one step for each active row. The other solver is
accelerated projected gradient (``projected_gradient``): it finds the support, and the same inverse
does the rest.

G contains the squared differences between nearly parallel rows, which float32 loses. So where z is
large or the active rows are nearly parallel, q is refined: r is measured from q itself, as M'q, and
the same solver corrects z, until q no longer changes. Otherwise r is b + Gz, to within rounding,
which saves a pass over the rows. If rows oppose each other to within rounding, such as a gradient
and the step against it, G has no inverse. The solver then takes shorter steps, and each correction
of q is scaled, down or up, so that q becomes shortest, since the dual is 1/2 ||q||^2 if rho is 0.

``dual`` solves the dual, ``gram`` computes inner products, and this file computes and refines q.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from fedjax_lab import checks
from fedjax_lab.clients.model_axis import are_divided, held_layout, on_each_part
from fedjax_lab.qp import dual, projected_gradient
from fedjax_lab.qp.gram import add_scaled, along, are_safe, rows_of, scaled_gram, sum_of_rows
from fedjax_lab.qp.joined_leaves import are_small, joined_rows
from fedjax_lab.tree import Joined
from fedjax_lab.types import PyTree, Scalar

SOLVERS = ("auto", "active_set", "projected_gradient")
_ROUNDS = 40  # largest number of corrections of q
_STALLS = 8  # consecutive corrections without improvement, after which refinement ends
_FARTHEST = 1.5  # largest ratio of a correction's length to the dual's prediction


class _Options(NamedTuple):
    solver: str
    tolerance: float | None
    max_iterations: int


class ConeInfo(NamedTuple):
    """Diagnostics of a projection. ``project_to_cone_per_leaf`` adds a leading axis to ``z`` only.

    Attributes:
      z: float [C], the dual solution for the unscaled rows; 0 for a masked or zero row.
      kkt_residual: float scalar, max over constraints c of max(-s_c, y_c |s_c| / Y, 0), where
        s_c = <q, M_c> / (||p|| ||M_c||) - margin, y_c = z_c ||M_c|| / ||p||, Y = max(1, max y).
        It is measured from q, except where its last correction cannot have changed it
        unexpectedly. (z >= 0 holds exactly.)
      iterations: int32 scalar, steps of the dual over all corrections; 0 if p was feasible.
      feasible: bool scalar, True if every s_c >= -1e-5 (float32) or -1e-10 (float64). With a margin
        of 0, which some q always satisfies, it is True if everything is finite. False for a margin
        that no q satisfies, and if p or a row is not finite: use p in these cases.

    A small ``kkt_residual`` means that q satisfies the conditions, not that q is near the exact
    solution. Where rows oppose each other to within 1e-3, float32 inner products do not resolve the
    cone: q then satisfies them to ``kkt_residual`` and may still be far from the solution.
    """

    z: jax.Array
    kkt_residual: jax.Array
    iterations: jax.Array
    feasible: jax.Array


def project_to_cone(
    p: PyTree,
    rows: PyTree,
    mask: jax.Array | None = None,
    margin: Scalar = 0.0,
    *,
    products: tuple[jax.Array, ...] | None = None,
    solver: str = "auto",
    tolerance: float | None = None,
    max_iterations: int = 2000,
) -> tuple[PyTree, ConeInfo]:
    """Return the vector nearest to ``p`` with <q, rows[c]> >= margin ||p|| ||rows[c]|| for all c.

    It works under jit, vmap, scan, pmap and shard_map, but has no reverse-mode derivative, because
    its loops have no fixed length. It computes in the widest dtype of the leaves, at least float32.
    Under vmap all lanes run until the slowest has finished.

    Passes over ``rows``: one for the inner products (none with ``products``). If p is not feasible,
    one more for q, and one or more pairs for refinements, if they are needed.

    Args:
      p: pytree of arrays, d numbers together.
      rows: pytree like p, each leaf with one leading axis C. A zero row is not a constraint. All
        rows must be finite, also masked ones.
      mask: bool [C], True for rows that are constraints. None: all rows are.
      margin: scalar >= 0, may be traced (rho in the official code).
      products: (M'M [C, C], M'p [C]), known inner products of the rows with each other and with p.
        They must be as accurate as those of ``inner_products``, which is not checked. They are
        ignored if a squared norm is near the limits of float32. With a third, p'p [], the program
        has no pass for the inner products, so that nothing can be computed again: ``feasible`` is
        False if a squared norm is not 0 and not within 2^-60 to 2^60. None: computed here.
      solver: solver of the dual. "active_set" takes about one step for each active row.
        "projected_gradient" takes ten steps or more for any number of active rows, and a sweep for
        each. "auto" is "active_set", which is as accurate, compiles faster on every platform and
        takes fewer steps in GradMA (docs/performance.md).
      tolerance: corrections stop when the next one would move q by at most this times ||p||.
        Default: 4 times the dtype's epsilon (5e-7 in float32).
      max_iterations: upper bound of ``info.iterations``.

    Returns:
      (q, info). q has the structure, shapes and dtypes of p, and equals p bit for bit if p is
      feasible. For a margin that no q satisfies, q is finite and ``info.feasible`` is False.

    Raises:
      TypeError: a leaf is not floating-point, or mask is not bool.
      ValueError: structures, shapes or C disagree, p has no leaves, or an option is out of range.
    """
    options = _Options(solver, tolerance, max_iterations)
    num_rows = _check(p, rows, mask, margin, options)
    _check_products(products, (num_rows,))
    layout = held_layout()
    specs = None if layout is None else layout.specs(p)
    return _project_parts(p, rows, mask, margin, products, options, specs)


def _project_parts(p, rows, mask, margin, products, options, specs):
    """Run ``_project``; if devices divide p, each has the same parts of the rows as of p."""
    layout = held_layout()
    if layout is None:
        divided = [False] * len(jax.tree.leaves(p))
        return _project(p, rows, mask, margin, products, options, divided)
    divided, same = are_divided(specs), PartitionSpec()
    of_rows = jax.tree.map(
        lambda spec: PartitionSpec(None, *spec),
        specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )

    def of_parts(p, rows, mask, margin, products):
        return _project(p, rows, mask, margin, products, options, divided)

    in_specs = specs, of_rows, same, same, same
    projected = on_each_part(of_parts, layout, in_specs, (specs, same))
    return projected(p, rows, mask, jnp.asarray(margin), products)


def _to_go(z, r, basis, valid) -> jax.Array:
    """Estimate how far the next correction will move q."""
    support, far = basis.support, dual.distances(basis)
    change = dual.matvec(basis.swept, jnp.where(support, r, 0))  # of z, and of r elsewhere
    inside = jnp.sqrt(jnp.abs(jnp.sum(jnp.where(support, change * r, 0))))
    inside = jnp.maximum(inside, jnp.max(jnp.where(support, jnp.abs(r), 0)))
    # Then a row outside the support that q violates enters, or one that still has z > 0 leaves.
    left = r - change
    outside = jnp.minimum(jnp.abs(left) / far, jnp.where(left < 0, jnp.inf, z * far))
    return jnp.maximum(inside, jnp.max(jnp.where(valid & ~support, outside, 0)))


def _project(p, rows, mask, margin, products, options, divided):
    leaves, treedef = jax.tree.flatten(p)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    row_leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(rows)]
    dtype = jnp.result_type(jnp.float32, *leaves, *row_leaves)
    if len(row_leaves[0]) == 0:
        zero = jnp.zeros((), dtype)
        return p, ConeInfo(jnp.zeros(0, dtype), zero, jnp.int32(0), jnp.bool_(True))
    small = are_small(leaves, divided)
    joined = Joined.of(leaves, small)
    q, info = _project_leaves(
        joined.arrays,
        joined_rows(row_leaves, small),
        mask,
        jnp.asarray(margin, dtype),
        products,
        options,
        [divided[group[0]] for group in joined.groups],
    )
    return jax.tree.unflatten(treedef, dataclasses.replace(joined, arrays=q).separate()), info


def _project_leaves(p_leaves, row_leaves, mask, margin, products, options, divided):
    """Run ``_project`` on lists of leaves, with at least one row."""
    num_rows, dtype = len(row_leaves[0]), margin.dtype
    eps = float(jnp.finfo(dtype).eps)
    tolerance = 4 * eps if options.tolerance is None else options.tolerance
    solve = projected_gradient.solve if options.solver == "projected_gradient" else dual.solve
    # Everything below is in units of p and of the rows: ||p|| = 1 and ||M_c|| = 1.
    rows = [rows_of(leaf) for leaf in row_leaves]
    scale, gram = scaled_gram(p_leaves, rows, dtype, mask, products, divided)
    norms = jnp.sqrt(jnp.diagonal(gram))  # [C + 1], of the scaled rows and, last, of the scaled p
    mask = jnp.ones(num_rows, bool) if mask is None else jnp.asarray(mask)
    valid = mask & (norms[:-1] > 0) & (norms[-1] > 0)  # p = 0 is its own projection
    counted = jnp.where(jnp.append(mask, True), norms, 0)
    known = products is not None and len(products) == 3
    usable = (counted == 0) | are_safe(counted**2) if known else jnp.isfinite(counted)
    unit = 1 / jnp.where(norms == 0, 1, norms)
    unit = jnp.append(jnp.where(valid, unit[:-1], 0), unit[-1])
    gram = gram * unit[:, None] * unit[None, :]
    gram, b = gram[:-1, :-1], gram[:-1, -1]

    def unfinished(state):
        *_, step, _, stalled, rounds = state
        return (step > tolerance) & (stalled < _STALLS) & (rounds < _ROUNDS)

    def correct(state):
        q, z, r, basis, iterations, _, least_step, stalled, rounds = state
        dz, basis, iterations = solve(
            gram, z, r, basis, iterations, valid=valid, max_iterations=options.max_iterations
        )
        r = r + dual.matvec(gram, dz)
        active = valid & (basis.support | (r <= 64 * eps * (1 + jnp.sum(z + dz))))
        least = jnp.min(jnp.where(active, dual.distances(basis), 1))
        # The effect on q of rounding in G dz, given how parallel the active rows are.
        known = eps * jnp.sum(jnp.abs(dz)) <= tolerance * least

        change = sum_of_rows(rows, dz * unit[:-1] * norms[-1], scale, dtype)

        until_zero = jnp.where(dz < 0, z / jnp.where(dz < 0, -dz, 1), _FARTHEST)
        farthest = jnp.minimum(jnp.min(until_zero), _FARTHEST)

        def search(turn, found):  # the minimum of the dual along dz, and r there
            length, _ = found
            there = add_scaled(q, length, change, scale)
            of_rows, of_change = along(there, change, rows, scale, dtype, divided)
            slope, curvature = of_change * unit[-1] ** 2
            slope = slope - margin * jnp.sum(dz)
            least = jnp.where(curvature > 0, -slope / jnp.where(curvature > 0, curvature, 1), 1)
            length = jnp.where(turn == 0, jnp.clip(least, 0, farthest), length)
            return length, of_rows * unit[:-1] * unit[-1] - margin

        # One loop, so that the program contains the pass over the rows once.
        start = jnp.where(known, 1, jnp.zeros((), dtype)), r
        length, r = lax.fori_loop(0, jnp.where(known, 0, 2), search, start)
        q = add_scaled(q, length, change, scale)
        z = jnp.maximum(z + length * dz, 0)
        r = jnp.where(valid, r, 0)
        step = _to_go(z, r, basis, valid)
        stalled = jnp.where(step < 0.9 * least_step, 0, stalled + 1)
        least_step = jnp.minimum(step, least_step)
        return q, z, r, basis, iterations, step, least_step, stalled, rounds + 1

    z, r = jnp.zeros_like(b), jnp.where(valid, b - margin, 0)
    basis, none = dual.empty_basis(gram), jnp.int32(0)
    step = jnp.max(jnp.maximum(-r, 0))  # what ``_to_go`` finds on an empty support
    infinite = jnp.full_like(step, jnp.inf)  # the first correction may seem far worse
    state = (p_leaves, z, r, basis, none, step, infinite, none, none)
    q, z, r, _, iterations, *_ = lax.while_loop(unfinished, correct, state)

    scale_of_z = jnp.maximum(jnp.max(z), 1)
    slack = jnp.where(margin == 0, jnp.inf, 1e-5 if eps > 1e-10 else 1e-10)
    info = ConeInfo(
        z=z * (unit[:-1] * norms[-1]) * (scale[:-1] / scale[-1]),
        kkt_residual=jnp.max(jnp.maximum(-r, z * jnp.abs(r) / scale_of_z), initial=0),
        iterations=iterations,
        feasible=jnp.all(usable) & jnp.all(jnp.isfinite(r) & (r >= -slack)),
    )
    return q, info


def project_to_cone_per_leaf(
    p: PyTree,
    rows: PyTree,
    mask: jax.Array | None = None,
    margin: Scalar = 0.0,
    *,
    products: tuple[jax.Array, ...] | None = None,
    solver: str = "auto",
    tolerance: float | None = None,
    max_iterations: int = 2000,
) -> tuple[PyTree, ConeInfo]:
    """Project each leaf of ``p`` separately, as GradMA's official code does.

    Args:
      p: pytree of arrays.
      rows: pytree like p, each leaf with one leading axis C.
      mask: bool [C], True for rows that are constraints. None: all rows are.
      margin: scalar >= 0, may be traced.
      products: each leaf's inner products, [leaves, C, C] and [leaves, C], and [leaves] if p'p are
        known, too, as in ``project_to_cone``; None: computed here.
      solver: as in ``project_to_cone``.
      tolerance: as in ``project_to_cone``.
      max_iterations: upper bound of the iterations of each leaf.

    Returns:
      (q, info): ``z`` is [leaves, C], ``kkt_residual`` the largest over the leaves, ``iterations``
      their sum, and ``feasible`` True if every leaf is feasible.

    Raises:
      TypeError: a leaf is not floating-point, or mask is not bool.
      ValueError: structures, shapes or C disagree, p has no leaves, or an option is out of range.
    """
    options = _Options(solver, tolerance, max_iterations)
    num_rows = _check(p, rows, mask, margin, options)
    leaves, treedef = jax.tree.flatten(p)
    _check_products(products, (len(leaves), num_rows))
    layout = held_layout()
    specs: list[Any] = [None] * len(leaves)
    if layout is not None:
        structure: Any = treedef
        specs = structure.flatten_up_to(layout.specs(p))
    results = []
    for index, (leaf, leaf_rows) in enumerate(zip(leaves, jax.tree.leaves(rows), strict=True)):
        own = products and tuple(product[index] for product in products)
        given = leaf, leaf_rows, mask, margin, own, options
        results.append(_project_parts(*given, specs[index]))
    infos = [info for _, info in results]
    info = ConeInfo(
        z=jnp.stack([info.z for info in infos]),
        kkt_residual=jnp.max(jnp.stack([info.kkt_residual for info in infos])),
        iterations=sum((info.iterations for info in infos), start=jnp.int32(0)),
        feasible=jnp.all(jnp.stack([info.feasible for info in infos])),
    )
    return jax.tree.unflatten(treedef, [q for q, _ in results]), info


def _check_products(products: Any, shape: tuple[int, ...]) -> None:
    if products is None:
        return
    expected = ((*shape, shape[-1]), shape, shape[:-1])
    shapes = tuple(jnp.shape(part) for part in products)
    if shapes not in (expected[:2], expected):
        raise ValueError(
            f"products has the shapes {shapes}; they must be {expected}, or the first two."
        )


def _check(p, rows, mask, margin, options) -> int:
    """Check the arguments of a projection, and return C."""
    checks.check_number("margin", margin, minimum=0)
    checks.check_choice("solver", options.solver, SOLVERS)
    checks.check_int("max_iterations", options.max_iterations, minimum=0)
    if options.tolerance is not None:
        checks.check_number("tolerance", options.tolerance, minimum=0)
    p_leaves, row_leaves = jax.tree.leaves(p), jax.tree.leaves(rows)
    p_tree: Any = jax.tree.structure(p)
    rows_tree: Any = jax.tree.structure(rows)
    if p_tree != rows_tree:
        raise ValueError(f"rows has the structure {rows_tree}; it must be that of p, {p_tree}.")
    if not p_leaves:
        raise ValueError("p has no leaves; it must hold at least one array.")
    for name, leaves in (("p", p_leaves), ("rows", row_leaves)):
        for leaf in leaves:
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                kind = jnp.result_type(leaf)
                raise TypeError(f"{name} has a leaf of dtype {kind}; it must be floating-point.")
    num_rows = jnp.shape(row_leaves[0])[0] if jnp.ndim(row_leaves[0]) else -1
    for p_leaf, leaf in zip(p_leaves, row_leaves, strict=True):
        if jnp.shape(leaf) != (num_rows, *jnp.shape(p_leaf)):
            raise ValueError(
                f"rows has a leaf of shape {jnp.shape(leaf)}; it must be (C, *shape of p's leaf) "
                f"with one C for all leaves, here {('C', *jnp.shape(p_leaf))}."
            )
    if mask is not None:
        if jnp.result_type(mask) != jnp.bool_:
            raise TypeError(f"mask has dtype {jnp.result_type(mask)}; it must be bool.")
        if jnp.shape(mask) != (num_rows,):
            raise ValueError(f"mask has shape {jnp.shape(mask)}; it must be ({num_rows},).")
    return num_rows
