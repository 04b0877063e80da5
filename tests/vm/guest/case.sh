# Runs one function of one case file, then checks for leftovers. Status: that of the function, or 1
# when the kernel logged a complaint, user objects are still in the device, or a program did not
# end.
# usage: sh case.sh FILE FUNCTION SECONDS
file=$1
function=$2
seconds=$3
. "$WEFT_VM/guest/lib.sh"

dmesg --clear
# a session of its own, so that programs which the case leaves running can be found and ended;
# --wait, because setsid forks when it already is a process group leader
setsid --wait timeout -k 5 "$seconds" bash -c '. "$WEFT_VM/guest/lib.sh"; . "$1"; "$2"' case "$file" "$function" &
case_pid=$!
wait $case_pid
status=$?
[ $status -eq 124 ] && echo "TIME LIMIT of $seconds s reached"

leftovers=$(other_processes)
if [ -n "$leftovers" ]; then
	kill -KILL $leftovers 2>/dev/null
fi

if ! resources_gone; then
	echo "LEFT BEHIND in the device: $(resource_counts); at rest it has $(cat /run/rxe-at-rest)"
	user_resources
	[ $status -eq 0 ] || [ $status -eq 77 ] && status=1
fi
if ! kernel_log_clean; then
	echo "KERNEL LOG not clean:"
	# from three lines above the first complaint: its cause is logged above the trace
	dmesg | grep -m 1 -B 3 -A 120 -E "$COMPLAINT"
	[ $status -eq 0 ] || [ $status -eq 77 ] && status=1
fi
# the case may have removed the device
[ -e /sys/class/infiniband/rxe0 ] || rxe_up || echo "rxe0 did not come back"
exit $status
