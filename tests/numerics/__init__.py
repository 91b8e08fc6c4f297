"""How right the numbers are: values, dtypes, shapes, strides, masks; the same bits every time."""
