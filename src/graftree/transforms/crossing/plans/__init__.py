"""Calls that cost what JAX costs: what a call with arguments like these learned.

    plans.py            which plan is for a call: the objects are those of before
    tree_plans.py       the same in tree mode, where objects may be new ones each time
    repeated_calls.py   the same for transforms that JAX doesn't compile
    planned_calls.py    a plan, and a call that follows it
    readers.py          the leaves of arguments, where their containers are as before
    loose_variables.py  Variables that are arguments by themselves

A plan gives what a `Call` without one would give, or says that it isn't right.
"""
