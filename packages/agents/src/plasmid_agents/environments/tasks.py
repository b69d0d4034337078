"""Prints the tasks of a recipe's environment as rows of a data file.

python -m plasmid_agents.environments.tasks RECIPE [KEY=VALUE ...] > tasks.jsonl
"""

from __future__ import annotations

import sys

from plasmid import PlasmidError, load_config

from .workflows import ForeignEnvironment


def main() -> None:
    """Print one row per task."""
    recipes = [item for item in sys.argv[1:] if item.endswith(".toml")]
    try:
        workflow = load_config(recipes, [item for item in sys.argv[1:] if item not in recipes]).workflow
        if not isinstance(workflow, ForeignEnvironment):
            sys.exit('workflow.kind: must be "verifiers", whose environments list tasks')
        sys.stdout.write(workflow.list_tasks())
    except PlasmidError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
