"""``zrpc secret``: a secret for a mesh on several hosts."""

from __future__ import annotations

from pathlib import Path

import click

from zrpc.secret import FILE_VARIABLE, new_secret, write_secret


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
def command(file: Path | None) -> None:
    """Make a cluster secret, for workers on several hosts.

    Writes it to FILE, a new file with mode 0600, or prints it where no FILE is given. Copy the
    file to each host, to be read by nobody else there, and name it in ZRPC_SECRET_FILE.
    """
    if file is None:
        click.echo(new_secret())
        return
    try:
        write_secret(file, new_secret())
    except FileExistsError:
        raise click.UsageError(
            f"there is a file {file} already, which may be in use: remove it, or name another"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{file} can't be written: {error.strerror}") from error
    click.echo(
        f"wrote {file}: copy it to each host, and set {FILE_VARIABLE}={file} there", err=True
    )
