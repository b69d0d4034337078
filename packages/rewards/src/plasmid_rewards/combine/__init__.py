"""Rewards made of rewards."""

from .boxed import Boxed
from .gate import Gate
from .isolated import Isolated
from .part import Part
from .product import Product
from .sum import Sum

__all__ = ["Boxed", "Gate", "Isolated", "Part", "Product", "Sum"]
