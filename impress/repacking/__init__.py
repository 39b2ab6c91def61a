"""Often-chosen rows packed side by side, in the background."""
