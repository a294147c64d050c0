"""Options of every command; each is defined once.

Each command has a table (`inspect.py`, `verify.py`, ...), composed of mixins that several commands share (`mesh.py`,
`source.py`, ...). Type checkers see a table as a frozen dataclass. A field is annotated with an `Option`, or with an
`Argument` or `Hook`; the `Setting` of a field joins its name, type, default and annotation. The field of an option:

    tp: Annotated[int | None, Option("Tensor-parallel size.", LAYOUT, minimum=1, default="1")] = None
        |              |                                                                         |
        type, choices  help, section of the help page, range, what it requires or excludes       default

    ReshardOptions --> cli/command.py    the click command: types, help in sections, completion
                   --> api.py            the Python function with its typed keyword arguments
                   --> checks            in the constructor, so that both refuse the same values with the same message
                   --> help.py           texts of `--help`, docs/options.md and docstrings
                   --> document.py       JSON document for a rank that ckptx starts
                   --> defaults.py       defaults from files and the environment
                   --> docs/options.md   the tables (tools/build_options_page.py)
"""
