"""``task=check_drafter``: how well a drafter predicts a target, under every reading of its conventions that its files
leave open.
"""

from spec_lab.tasks.check_drafter.task import check as check
