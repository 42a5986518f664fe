"""``prorld batch``: groups of samples for a training step, from what is asked for to what is trained on."""

from __future__ import annotations

import argparse

from prorld.cli import batch_feed, batch_groups, batch_show, batch_watch
from prorld.cli.common import Help, add_client_options, add_json_option, epilog, positive

SUMMARY = "groups to train on: batches, their progress, their groups"

# The values of ``prorld.domain.batch``; written out so that help needs no import of the domain.
STATES = ("running", "complete", "exhausted", "cancelled", "failed")
SELECTIONS = ("arrival", "submission")
LEFTOVERS = ("carry", "drain", "cancel")
RULES = ("spread", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "A batch asks for so many groups that training can learn from, each of n samples of one prompt. The daemon\n"
        "starts more while it needs more, ends what it needs no longer, and keeps what nobody acknowledged."
    )
    parser.epilog = epilog(
        ("prorld batch submit prompts.jsonl --handler math --target 32 --samples 8", "32 groups of 8"),
        ("prorld batch submit more.jsonl --handler math --target 32 --carry-from ID", "with what another one left"),
        ("prorld batch watch ID", "live, until it is over"),
        ("prorld batch show ID", "what became of its groups, and what speed did to them"),
        ("prorld batch groups ID --trajectories -o groups.jsonl --ack", "into a file; the same again goes on"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions (list, if none)")
    _submit_arguments(actions.add_parser("submit", help="ask for groups", formatter_class=Help))
    _list_arguments(actions.add_parser("list", help="the batches, newest first", formatter_class=Help))
    _show_arguments(actions.add_parser("show", help="what became of its groups", formatter_class=Help))
    _watch_arguments(actions.add_parser("watch", help="follow it to its end", formatter_class=Help))
    _groups_arguments(actions.add_parser("groups", help="the groups to train on", formatter_class=Help))
    _ack_arguments(actions.add_parser("ack", help="say that groups are safe", formatter_class=Help))
    _append_arguments(actions.add_parser("append", help="give it more prompts", formatter_class=Help))
    _cancel_arguments(actions.add_parser("cancel", help="end it", formatter_class=Help))


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    return int(args.act(args))


def _submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Asks for groups and prints the batch's id. FILE holds a whole batch as `POST /v1/batches` takes it, or one\n"
        "instance per line. More prompts than fit at once follow as the daemon takes them."
    )
    parser.epilog = epilog(
        ("prorld batch submit step-12.json", "a whole batch"),
        ("prorld batch submit - --handler math --target 32 < prompts.jsonl", "instances, one per line"),
        ("prorld batch submit prompts.jsonl --handler math --eval --samples 4", "every group, whatever it came to"),
        ("prorld batch submit step-12.json --dry-run", "what would be sent"),
    )
    parser.add_argument("file", metavar="FILE", help="a batch as JSON, or one instance per line; - for stdin")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    parser.add_argument("--open", action="store_true", help="more prompts will follow by `prorld batch append`")
    over = parser.add_argument_group("over what the file says")
    over.add_argument(
        "--id", dest="batch_id", metavar="ID", help="an id of your own, by which the call can be repeated"
    )
    over.add_argument("--handler", metavar="H", help="the kind of task (see `prorld handlers`)")
    over.add_argument("--policy", metavar="NAME", help="the policy to sample from (default: default)")
    over.add_argument("--target", type=positive, metavar="N", help="so many informative groups (default: a stream)")
    over.add_argument("--samples", type=positive, metavar="N", help="samples of a group (default 8)")
    over.add_argument("--eval", action="store_true", help="an evaluation: every group is delivered")
    over.add_argument("--rule", choices=RULES, help="which groups are informative (default spread)")
    over.add_argument("--selection", choices=SELECTIONS, help="the first to end, or in the order of FILE")
    over.add_argument("--max-running", type=positive, metavar="N", help="groups at once (default 1.5 times the target)")
    over.add_argument("--max-groups", type=positive, metavar="N", help="stop after so many groups")
    over.add_argument("--max-wall", type=float, metavar="SECONDS", help="stop after so long")
    over.add_argument("--max-staleness", metavar="N", help="versions a group may be old; `none` for any (default 2)")
    over.add_argument("--leftovers", choices=LEFTOVERS, help="what becomes of the rest (default carry)")
    over.add_argument("--carry-from", metavar="ID", help="a batch whose leftovers come first")
    over.add_argument("--priority", type=int, metavar="N", help="higher runs earlier")
    over.add_argument("--max-tokens", type=positive, metavar="N", help="tokens in one turn (default 2048)")
    over.add_argument("--temperature", type=float, metavar="T", help="of sampling (default 1)")
    over.add_argument("--seed", type=int, metavar="N", help="of sampling (default: none)")
    over.add_argument("--max-turns", type=positive, metavar="N", help="turns of the policy")
    _common(parser, batch_feed.submit)


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the batches, newest first."
    parser.add_argument("--state", choices=STATES, help="only batches in this state")
    parser.add_argument("--limit", type=positive, default=20, metavar="N", help="at most so many (default 20)")
    _common(parser, batch_show.list_batches)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a batch: its groups by what became of them, the rewards before the filter, how much faster accepted\n"
        "groups were than the others, what was wasted, how old the policy was."
    )
    _of_batch(parser)
    _common(parser, batch_show.show)


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Follows a batch to its end: one moving line on a terminal, a line for each group elsewhere, with --json each\n"
        "event. Outlives restarts of the daemon. Exit code 0 when it ended complete or exhausted."
    )
    _of_batch(parser)
    parser.add_argument("--after", type=_number, default=0, metavar="SEQ", help="only events after this number")
    _patience(parser)
    _common(parser, batch_watch.watch)


def _groups_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the groups to train on as JSON, one per line, as they are accepted, until the batch has no more.\n"
        "With -o the same command again goes on after the last line of FILE."
    )
    _of_batch(parser)
    parser.add_argument("--trajectories", action="store_true", help="with the tokens of every sample")
    parser.add_argument("--instances", action="store_true", help="with the instance")
    parser.add_argument("-o", "--out", metavar="FILE", help="append to this file instead of printing")
    parser.add_argument("--ack", action="store_true", help="acknowledge each group when it is written")
    parser.add_argument("--after", type=_number, metavar="SEQ", help="only later ones (default: what is acknowledged)")
    parser.add_argument("--no-wait", action="store_true", help="only what is there now")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="give up when no group comes for so long")
    _patience(parser)
    _common(parser, batch_groups.groups)


def _ack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Acknowledges groups: the daemon may forget them, and new ones get their room."
    _of_batch(parser)
    parser.add_argument("--through", type=_number, required=True, metavar="SEQ", help="every group up to this number")
    parser.add_argument("--discard", action="append", default=[], metavar="GROUP", help="of no use; several times")
    _common(parser, batch_groups.ack)


def _append_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Gives a running batch more prompts, one instance per line; waits while its window is full. With --offset the\n"
        "same command again takes nothing twice."
    )
    _of_batch(parser)
    parser.add_argument("file", metavar="FILE", help="one instance per line; - for stdin")
    parser.add_argument("--offset", type=_number, metavar="N", help="how many it got before (default: all it has)")
    parser.add_argument("--last", action="store_true", help="there will be no more")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="give up after so long (default 10 minutes)")
    _common(parser, batch_feed.append)


def _cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ends a batch and whatever runs for it, or what an ended one left. Groups that were accepted stay."
    )
    _of_batch(parser)
    parser.add_argument("--reason", metavar="TEXT", help="kept with the batch")
    _common(parser, batch_groups.cancel)


def _of_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch", metavar="ID", help="the batch's id")


def _patience(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="SECONDS", help="wait so long for a daemon (default 300)"
    )


def _common(parser: argparse.ArgumentParser, act: object) -> None:
    add_client_options(parser)
    add_json_option(parser)
    parser.set_defaults(act=act)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)
