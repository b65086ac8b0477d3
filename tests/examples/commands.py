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


def check_output_that_is_no_folder(capsys, main, file, below=""):
    """Refuses to write where a file is, and leaves that as it is."""
    file.write_text("mine")
    error = error_line(capsys, main, ["--output", str(file / below)])
    assert f"cannot write to the folder {file}" in error
    assert file.read_text() == "mine"
