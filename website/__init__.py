"""The documentation as a site: runs the pages of ``docs/``, and builds from them.

    pages.py      a page as text: its blocks of code, their outputs and pictures
    running.py    runs the blocks of a page, in order
    outputs.py    is what a block printed what the page says?
    writing.py    a page with other outputs and pictures
    figures.py    what was measured, in the sentences of quotations.py
    sessions.py   a session in a terminal, as a picture
    reference.py  the pages that list the public names
    mkdocs_hooks.py  which pages have a link to their source
    docstrings.py what mkdocstrings shows of each
    searching.py  which page a search finds first
    building.py   all of it, and mkdocs

``python -m website --help`` says what it does; ``tests/docs/`` uses it, too.
"""
