"""Objects and their functional form.

Paths, filters and text; Variables, Pytrees, containers and Modules; Rngs; State and
GraphDef, and the functions that go back and forth between objects and them.
"""
