# Recipes for people and for CI. Run them as `./just RECIPE`; with a uv and a just of your own, plain `just` works, too.

set positional-arguments

bin := justfile_directory() / ".venv/bin"

# List the recipes.
default:
    @"{{ just_executable() }}" --justfile "{{ justfile() }}" --list --unsorted

# Install everything that developing needs into .venv.
init: (_env "dev")

# Real rollouts of a small real model in real sandboxes: from nothing to graded trajectories.
[no-exit-message]
demo *ARGS: (_env "demo")
    @PRORLD_PROGRAM="./just prorld" "{{ bin }}/prorld" demo "$@"

# The command line of prorld, as in `./just prorld --help`.
[no-cd, no-exit-message]
prorld *ARGS: (_env "demo")
    @PRORLD_PROGRAM="./just prorld" "{{ bin }}/prorld" "$@"

# Install a task package of your own beside prorld, editable, as in `./just plugin ../my-tasks`.
[no-cd]
plugin DIR: (_env "demo")
    @"{{ justfile_directory() }}/scripts/plugin" "$1"

# Install an optional part of prorld, by its name in pyproject.toml, as in `./just extra parquet`.
[no-exit-message]
extra NAME: (_env "demo")
    @scripts/extra "$1"

# Every test that needs no system package, the fast ones first; ARGS go to pytest.
test *ARGS: (_env "dev")
    @"{{ bin }}/pytest" -m "not real" "$@"

# The fast tests only.
test-fast *ARGS: (_env "dev")
    @"{{ bin }}/pytest" -m "not slow and not real" "$@"

# Tests on real things: engines, sandboxes, docker, systemd, slurm, tasks (all that there are when none is named).
test-real *NAMES: (_env "dev")
    @scripts/test-real "$@"

# The long cancel sweep: each scenario once per scheduler step with a cancel there, over SEEDS seeds.
sim SEEDS="100": (_env "dev")
    PRORLD_SWEEP_SEEDS="$1" "{{ bin }}/pytest" -s tests/rollout/test_sweep.py

# Format, lint, types and the order of the layers. Changes nothing.
check: (_env "dev")
    @scripts/check

# Format, and repair what the linter can repair by itself.
fix: (_env "dev")
    "{{ bin }}/ruff" check --fix
    "{{ bin }}/ruff" format

# What has to pass before anything is merged.
ci: check test
    @scripts/test-real --quick

# Make the lock files again; `./just lock --upgrade` moves to newer versions.
lock *ARGS:
    @scripts/lock "$@"

# Build the wheel and the source archive into dist/.
build:
    @"${PRORLD_UV:-uv}" build

_env PROFILE:
    @scripts/env {{ PROFILE }}
