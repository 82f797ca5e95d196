"""The quadratic program of GradMA: the nearest vector in a cone."""

from fedjax_lab.qp.gram import inner_products
from fedjax_lab.qp.project import ConeInfo, project_to_cone, project_to_cone_per_leaf

__all__ = ["ConeInfo", "inner_products", "project_to_cone", "project_to_cone_per_leaf"]
