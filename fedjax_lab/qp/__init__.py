"""The quadratic program of GradMA: the nearest vector in a cone."""

from fedjax_lab.qp.gram import inner_products
from fedjax_lab.qp.project import SOLVERS, ConeInfo, project_to_cone, project_to_cone_per_leaf

__all__ = ["SOLVERS", "ConeInfo", "inner_products", "project_to_cone", "project_to_cone_per_leaf"]
