"""A static value that can be changed in place."""


class Tag:
    """A static value whose hash is its content."""

    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return isinstance(other, Tag) and self.name == other.name
