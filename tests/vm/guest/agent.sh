# Process 1 of the guest: sets up the network and rxe0, then runs the commands that the host
# sends on the virtio port `cmd`, one at a time. A command is a script in the exchange directory.
#   host -> guest   run ID SECONDS MEMLOCK     SECONDS 0: no limit; MEMLOCK: KiB or unlimited
#                   off
#   guest -> host   ready, done ID STATUS
# Output goes through pipes, not to the ports themselves: a port can be opened only once, and
# programs that open /dev/stderr would fail. A marker in both streams ends a command's output.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
HOME=/root
LANG=C.UTF-8
TERM=dumb
export PATH HOME LANG TERM

mode=run pair=
for word in $(cat /proc/cmdline); do
	case $word in
	weft.project=*) WEFT_PROJECT=${word#*=} ;;
	weft.provider=*) provider=${word#*=} ;;
	weft.mode=*) mode=${word#*=} ;;
	weft.pair=*) pair=${word#*=} ;;
	weft.memlock=*) memlock=${word#*=} ;;
	weft.term=*) term=${word#*=} ;;
	weft.size=*) size=${word#*=} ;;
	esac
done
WEFT_VM=$WEFT_PROJECT/tests/vm
WEFT_PAIR=$pair
export WEFT_PROJECT WEFT_VM WEFT_PAIR
cd "$WEFT_PROJECT" || echo "agent: no project at $WEFT_PROJECT"

hostname "weft-vm${pair:+-$pair}"
. "$WEFT_VM/guest/lib.sh"
net_up
# the guest's own name resolves: a test of mpi4py connects to it
printf '127.0.0.1 localhost\n%s %s\n' "$(rxe_addr4)" "$(hostname)" >/etc/hosts
rxe_up || echo "agent: rxe0 did not come up"
# In each program libfabric's providers verbs and efa read all of /proc/kallsyms, for the kernel's
# support of peer memory: 217,615 lines, more than half of the time of fi_info in an emulated kernel.
: >/run/kallsyms
mount --bind /run/kallsyms /proc/kallsyms
ulimit -n 65536
ulimit -c 0

run_limited() { # MEMLOCK program...
	limit=$1
	shift
	ulimit -l "$limit"
	if [ "$limit" = unlimited ]; then
		exec "$@"
	fi
	# the kernel ignores RLIMIT_MEMLOCK for a process with CAP_IPC_LOCK: drop it
	exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"
}

if [ "$mode" = shell ]; then
	echo "weft: rxe0 on $(rxe_addr4) and $(rxe_addr6); project read-only here, /xchg is writable; exit ends the guest" >/dev/ttyS1
	TERM=${term:-linux}
	export FI_PROVIDER_PATH="$provider"
	stty -F /dev/ttyS1 rows "${size%x*}" cols "${size#*x}"
	(run_limited "${memlock:-unlimited}" setsid -c bash -l -i </dev/ttyS1 >/dev/ttyS1 2>&1)
	echo o >/proc/sysrq-trigger
	sleep 60
fi

for port in /sys/class/virtio-ports/*; do
	case $(cat "$port/name") in
	cmd) cmd=/dev/${port##*/} ;;
	out) out=/dev/${port##*/} ;;
	err) err=/dev/${port##*/} ;;
	esac
done
mkfifo /run/out /run/err
exec 3<>"$cmd" 8<>/run/out 9<>/run/err
cat <&8 >"$out" 8>&- 9>&- 3>&- &
cat <&9 >"$err" 8>&- 9>&- 3>&- &

echo ready >&3
while read -r verb id seconds limit <&3; do
	case $verb in
	run)
		script=/xchg/cmd-$id
		if [ "$seconds" = 0 ]; then
			(run_limited "$limit" sh "$script" </dev/null >&8 2>&9 3>&- 8>&- 9>&-)
		else
			(run_limited "$limit" timeout -k 5 "$seconds" sh "$script" </dev/null >&8 2>&9 3>&- 8>&- 9>&-)
		fi
		status=$?
		printf '\000weft-vm-end %s\000' "$id" >&8
		printf '\000weft-vm-end %s\000' "$id" >&9
		echo "done $id $status" >&3
		;;
	off)
		break
		;;
	esac
done
echo o >/proc/sysrq-trigger
sleep 60
