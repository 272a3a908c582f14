#!/bin/sh
# For train.on_exit: says in Slack how a run has ended. SLACK_WEBHOOK is the address of an incoming webhook.
set -eu
: "${SLACK_WEBHOOK:?set it to the address of an incoming webhook}"
python3 -c 'import json, os
names = ("RUN", "STATUS", "STEP", "REASON")
run, status, step, reason = (os.environ["MESHTRAIN_" + name] for name in names)
print(json.dumps({"text": f"{run}: {status} after step {step}: {reason}"}))' |
    curl --fail --silent --show-error --max-time 20 --header 'Content-Type: application/json' --data @- "$SLACK_WEBHOOK"
