"""How windows are cut from rows, and where the copies lie.

Windows overlap, so a copy of every window takes `window / stride` times the memory of the rows. The strategies here
range from such copies (arrays, lists, a file) to views of the rows from which each batch is gathered, on the host or
on the device. Documents of all lengths are laid out otherwise: `packed` end to end, `truncated` cut.
"""
