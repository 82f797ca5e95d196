"""GradMA's correction: the quadratic program over all parameters, or one for each array."""

import dataclasses

import jax

from fedjax_lab import qp, tree
from fedjax_lab.checks import check_choice, check_number
from fedjax_lab.qp.joined_leaves import join_leaves
from fedjax_lab.types import PyTree, Scalar


@dataclasses.dataclass(frozen=True)
class Correction:
    """GradMA's QP: how a vector is corrected by the rows of a memory.

    Attributes:
      margin, scope, solver: arguments of the methods, the last two with ``qp_`` before them.
    """

    margin: Scalar
    scope: str  # "global" or "per_leaf"
    solver: str

    def __post_init__(self):
        check_number("margin", self.margin, minimum=0.0, maximum=1.0)
        check_choice("qp_scope", self.scope, ("global", "per_leaf"))
        check_choice("qp_solver", self.solver, qp.SOLVERS)

    def joined(self, values: PyTree, axes: int = 0) -> PyTree:
        """Join the small leaves of vectors, where the scope has no need of the leaves.

        Args:
          values: pytree [...], or [m, ...] with one of ``axes``.
        """
        return join_leaves(values, axes) if self.scope == "global" else values

    def inner_products(self, rows: PyTree, *others: PyTree) -> jax.Array:
        """Compute inner products of rows, float [1 or leaves, m, k], as the scope needs them.

        Args:
          rows: pytree [m, ...].
          *others: pytrees [k_i, ...], whose numbers of rows add up to k; none: ``rows``.
        """
        products = qp.inner_products(rows, *others)
        return products.sum(0, keepdims=True) if self.scope == "global" else products

    def project(self, p, rows, mask=None, products=None):
        """Correct ``p``, or return it unchanged if the QP is infeasible; also its ``ConeInfo``.

        Args:
          p: pytree [...].
          rows: pytree [m, ...].
          mask: bool [m], which rows count; None: all.
          products: of the rows with each other and with ``p``, and of ``p`` with itself, as
            ``inner_products`` gives them: [1 or leaves, m, m], [..., m] and [...].
        """
        if self.scope == "global":
            cone, products = qp.project_to_cone, products and tuple(of[0] for of in products)
        else:  # a leaf may be small beside the others, so its products may be computed again
            cone, products = qp.project_to_cone_per_leaf, products and products[:2]
        q, info = cone(p, rows, mask, self.margin, products=products, solver=self.solver)
        return tree.where(info.feasible, q, p), info
