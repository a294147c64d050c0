"""The options of every command, each written down once.

One table for each command (`inspect.py`, `verify.py`, ...), composed of mixins that several commands share (`mesh.py`,
`source.py`, ...). A table is a frozen dataclass to type checkers, and a field of it is an option:

    tp: Annotated[int | None, Option("Tensor-parallel size.", LAYOUT, minimum=1, default="1")] = None
        |              |                                                                         |
        type, choices  help, section of the help page, range, what it requires or excludes       default

    ReshardOptions --> cli/command.py    the click command: types, help in sections, completion
                   --> api.py            the Python function with its typed keyword arguments
                   --> checks            in the constructor, so that both refuse the same values in the same words
                   --> document.py       one JSON document for a rank that ckptx starts
                   --> defaults.py       defaults from files and the environment
                   --> docs/options.md   the tables (tools/build_options_page.py)
"""
