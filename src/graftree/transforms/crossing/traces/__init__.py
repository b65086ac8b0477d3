"""What a trace depended on.

traces.py           each trace of a compiled function, noted for those who ask
dependencies.py     the same as facts by path, to compare two traces
counters.py         a word, unasked, if one static attribute makes all the traces
"""
