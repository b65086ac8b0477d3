"""What the commands of the examples have in common."""

import pytest

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def error_line(capsys, main, arguments):
    """The one line on stderr with which ``arguments`` are refused."""
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    return error
