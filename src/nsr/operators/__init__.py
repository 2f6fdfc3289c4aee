"""What loses information: a linear many-to-one map ``A``, its lift ``U`` (with ``A U A = A``), and ``I - U A``."""

from nsr.operators.check import Check, check
from nsr.operators.dense import Dense
from nsr.operators.function import Function
from nsr.operators.operator import LinearOperator
from nsr.operators.segment import Segment

__all__ = ["Check", "Dense", "Function", "LinearOperator", "Segment", "check"]
