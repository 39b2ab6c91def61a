"""Published multiple-choice tasks: rows from a path or a data set's name, as lm-eval asks them."""

from experiments.tasks.formats import FORMATS, Item
from experiments.tasks.rows import Rows, load
from experiments.tasks.shots import Drawn, draw

__all__ = ["FORMATS", "Drawn", "Item", "Rows", "draw", "load"]
