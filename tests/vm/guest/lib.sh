# Shell functions of the guest: network, rxe0, and functions that several cases use. One guest: veth
# pair v0-v1, rxe0 on v0. Two guests: rxe0 on the virtual link between them.

rxe_dev() {
	if [ -n "$WEFT_PAIR" ]; then
		for nic in /sys/class/net/*; do
			[ -e "$nic/device" ] && basename "$nic" && return
		done
	else
		echo v0
	fi
}

rxe_addr4() { case $WEFT_PAIR in a) echo 10.78.0.1 ;; b) echo 10.78.0.2 ;; *) echo 10.77.0.1 ;; esac }
rxe_addr6() { case $WEFT_PAIR in a) echo fd78::1 ;; b) echo fd78::2 ;; *) echo fd77::1 ;; esac }
peer_addr4() { case $WEFT_PAIR in a) echo 10.78.0.2 ;; b) echo 10.78.0.1 ;; *) echo 10.77.0.1 ;; esac }
peer_addr6() { case $WEFT_PAIR in a) echo fd78::2 ;; b) echo fd78::1 ;; *) echo fd77::1 ;; esac }

net_up() {
	ip link set lo up
	if [ -z "$WEFT_PAIR" ]; then
		ip link add v0 type veth peer name v1
		ip link set v1 up
	fi
	dev=$(rxe_dev)
	# without this, an interface that goes down loses its IPv6 address
	echo 1 >/proc/sys/net/ipv6/conf/all/keep_addr_on_down
	# the GIDs of rxe0 are made from these addresses; duplicate address detection would delay
	# the IPv6 one
	ip link set "$dev" up
	ip addr add "$(rxe_addr4)/24" dev "$dev"
	ip addr add "$(rxe_addr6)/64" dev "$dev" nodad
}

rxe_up() {
	rdma link add rxe0 type rxe netdev "$(rxe_dev)" && rxe_wait && resource_counts >/run/rxe-at-rest
}

# Waits until the port is active and both addresses are in the GID table; fails after ten seconds.
rxe_wait() {
	tries=0
	while [ $tries -lt 100 ]; do
		case $(cat /sys/class/infiniband/rxe0/ports/1/state 2>/dev/null) in
		*ACTIVE*)
			gids=$(cat /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null | grep -cE '^(0000:0000:0000:0000:0000:ffff:|fd7)')
			[ "$gids" -ge 2 ] && return 0
			;;
		esac
		tries=$((tries + 1))
		sleep 0.1
	done
	return 1
}

rxe_down() { rdma link delete rxe0; }

# User-space objects in all devices, one line each; the kernel's own (GSI queue pair and so on) have
# no pid.
user_resources() {
	for kind in qp cq pd mr cm_id ctx srq; do
		rdma resource show "$kind" 2>/dev/null | grep ' pid ' | sed "s/^/$kind /"
	done
}

# One line with the number of objects of each kind; without programs it is as when rxe0 came up.
resource_counts() { rdma resource show | sed 's/^[0-9]*: //'; }

# Waits until the kernel has freed the objects of dead programs: eight seconds at most.
resources_gone() {
	tries=0
	while [ $tries -lt 40 ]; do
		[ "$(resource_counts)" = "$(cat /run/rxe-at-rest)" ] && return 0
		tries=$((tries + 1))
		sleep 0.2
	done
	return 1
}

COMPLAINT='WARNING|BUG|Oops|Call Trace|call trace|refcount_t|KASAN|general protection|hung_task|blocked for more'
kernel_log_clean() { ! dmesg | grep -qE "$COMPLAINT"; }

# Processes other than the kernel's threads, the agent, and the processes of this session.
other_processes() {
	ps -eo pid=,sid=,ppid= | awk -v me="$(ps -o sid= -p $$)" '$2 != 0 && $2 != me + 0 && $3 != 2 { print $1 }'
}

# --- functions for the cases ---

# Whether the kernel's rxe has on-demand regions and advice.
has_on_demand() { kernel=$(uname -r) && dpkg --compare-versions "${kernel%%-*}" ge 6.16; }

skip() { echo "$*"; exit 77; }

FIPEER=$WEFT_PROJECT/build/vm/fipeer
WEFT_DIR=${WEFT_DIR:-$WEFT_PROJECT/build/lib/libfabric}

# Environment of one program: `with weft fi_info ...`, `with verbs fi_info ...`.
with() {
	provider=$1
	shift
	case $provider in
	weft) FI_PROVIDER_PATH=$WEFT_DIR FI_PROVIDER=weft "$@" ;;
	*) FI_PROVIDER=$provider "$@" ;;
	esac
}

# The same for `with_exec weft program & ... kill $!`: the job is the program itself, without a
# shell around it.
with_exec() {
	provider=$1
	shift
	export FI_PROVIDER="$provider"
	[ "$provider" = weft ] && export FI_PROVIDER_PATH="$WEFT_DIR"
	exec "$@"
}

# Between the guests of a pair: files in the shared exchange directory; only for starting in step.
signal() { : >"/xchg/signal-$1"; }
await() { # NAME SECONDS
	tries=0
	while [ ! -e "/xchg/signal-$1" ]; do
		tries=$((tries + 1))
		if [ $tries -gt $(($2 * 5)) ]; then
			echo "no signal $1 from the other guest in $2 s"
			return 1
		fi
		sleep 0.2
	done
}

# Waits until two queue pairs of programs exist, those of a connection, and then 1 s for transfers. A
# guest with a tenth of a processor needs seconds to start a program.
await_transfers() {
	tries=0
	while [ "$(rdma resource show qp | grep -c ' pid ')" -lt 2 ]; do
		tries=$((tries + 1))
		if [ $tries -gt 300 ]; then
			echo "no transfers"
			user_resources
			return 1
		fi
		sleep 0.2
	done
	sleep 1
}

# For cases that must not wait for the start of a program: `rest SECONDS` waits without one, after
# `can_rest`, and `uptime_is` sets `now` to the tenths of a second since the boot. In bash.
can_rest() { { [ -p /tmp/never ] || mkfifo /tmp/never; } && exec 8<>/tmp/never; }
rest() { read -r -t "$1" -u 8 || true; }
uptime_is() {
	read -r now _ </proc/uptime
	now=$((10#${now%.*} * 10 + 10#${now#*.} / 10))
}

# Waits in this way until flow, whose output is /tmp/flow, has begun its traffic, and then 1 s.
await_flow() {
	tries=0
	while mapfile -t lines </tmp/flow && [[ ${lines[*]} != *begins* ]] && [ $tries -lt 200 ]; do
		tries=$((tries + 1))
		rest 0.1
	done
	rest 1
}

# Waits until a process listens on a TCP port.
await_port() {
	tries=0
	while ! ss -Hltn "sport = :$1" | grep -q .; do
		tries=$((tries + 1))
		if [ $tries -gt 150 ]; then
			echo "no process listens on port $1"
			return 1
		fi
		sleep 0.2
	done
}

# fi_pingpong within one guest, on rxe0's own address. pingpong PROVIDER ADDRESS [options]
pingpong() {
	provider=$1
	address=$2
	shift 2
	with_exec "$provider" fi_pingpong -p "$provider" -d rxe0 -e msg -c "$@" >/tmp/pp-server 2>&1 &
	server=$!
	await_port 47592 || { cat /tmp/pp-server; return 1; }
	with "$provider" fi_pingpong -p "$provider" -d rxe0 -e msg -c "$@" "$address"
	client_status=$?
	wait $server
	server_status=$?
	[ $server_status -eq 0 ] || { echo "server ended with $server_status:"; cat /tmp/pp-server; }
	[ $client_status -eq 0 ] && [ $server_status -eq 0 ]
}

# fipeer within one guest. fipeer_both SERVER-PROVIDER CLIENT-PROVIDER ADDRESS TEST [options]
fipeer_both() {
	server_provider=$1
	client_provider=$2
	address=$3
	test=$4
	shift 4
	with_exec "$server_provider" "$FIPEER" -s -p "$server_provider" -d rxe0 "$@" "$test" "$address" >/tmp/fipeer-server 2>&1 &
	server=$!
	with "$client_provider" "$FIPEER" -p "$client_provider" -d rxe0 "$@" "$test" "$address"
	client_status=$?
	[ $client_status -eq 0 ] || { sleep 1; kill $server 2>/dev/null; }
	wait $server
	server_status=$?
	sed 's/^/server: /' /tmp/fipeer-server
	[ $client_status -eq 0 ] && [ $server_status -eq 0 ]
}

# The program bench_rdm within one guest. bench_rdm PROVIDER ITERATIONS BYTES
bench_rdm() {
	export FI_PROVIDER_PATH="$WEFT_DIR" FI_WEFT_DEVICE=rxe0 FI_TCP_IFACE=v0
	# ofi_rxm opens a queue for this number of peers; rxe's have at most 32,767 entries
	export FI_UNIVERSE_SIZE=16
	address=$(rxe_addr4)
	"$WEFT_PROJECT/build/vm/bench_rdm" -s "$1" "$address" 7101 "$address" 7102 "$2" "$3" >/tmp/bench-server 2>&1 &
	server=$!
	sleep 1
	"$WEFT_PROJECT/build/vm/bench_rdm" "$1" "$address" 7102 "$address" 7101 "$2" "$3"
	client_status=$?
	[ $client_status -eq 0 ] || { sleep 1; kill $server 2>/dev/null; }
	wait $server
	server_status=$?
	[ $server_status -eq 0 ] || sed 's/^/server: /' /tmp/bench-server
	[ $client_status -eq 0 ] && [ $server_status -eq 0 ]
}

# fipeer's test count within one guest, the client under callgrind, which waits SECONDS for each
# completion. count_calls PROVIDER CALLS SECONDS OUTPUT
count_calls() {
	with_exec "$1" "$FIPEER" -s -p "$1" -d rxe0 -n "$2" count "$(rxe_addr4)" >/tmp/count-server 2>&1 &
	server=$!
	export VALGRIND_LIB="$WEFT_PROJECT/build/vm/valgrind/lib"
	with "$1" "$WEFT_PROJECT/build/vm/valgrind/valgrind" -q --tool=callgrind --instr-atstart=no --dump-instr=yes --compress-pos=no --compress-strings=no \
		'--toggle-collect=count_*' --callgrind-out-file="$4" "$FIPEER" -p "$1" -d rxe0 -n "$2" -T "$3" count "$(rxe_addr4)"
	client_status=$?
	[ $client_status -eq 0 ] || kill $server 2>/dev/null
	wait $server
	server_status=$?
	[ $client_status -ne 0 ] || [ $server_status -eq 0 ] || { cat /tmp/count-server; return 1; }
	return $client_status
}

# fi_pingpong between the guests; STEP names the synchronization point, so that a case can have
# several.
pair_pingpong_server() { # PROVIDER STEP [options]
	provider=$1
	step=$2
	shift 2
	with_exec "$provider" fi_pingpong -p "$provider" -d rxe0 -e msg -c -I 5 -S 4096 "$@" &
	await_port 47592 && signal "pingpong-$step" && wait $!
}
pair_pingpong_client() { # PROVIDER ADDRESS STEP [options]
	provider=$1
	address=$2
	step=$3
	shift 3
	await "pingpong-$step" 60 && with "$provider" fi_pingpong -p "$provider" -d rxe0 -e msg -c -I 5 -S 4096 "$@" "$address"
}

# fipeer's transfer test between the guests; a port of its own for each STEP (a number).
pair_fipeer_server() { # PROVIDER ADDRESS STEP
	with "$1" "$FIPEER" -s -p "$1" -d rxe0 -P "1860$3" transfer "$2"
}
pair_fipeer_client() {
	with "$1" "$FIPEER" -p "$1" -d rxe0 -P "1860$3" transfer "$2"
}

# The survivor's side of the cases that power the other guest off. survivor PROVIDER MODE LIMIT
survivor() {
	with_exec "$1" "$FIPEER" -p "$1" -d rxe0 -m "$2" -T "$3" survive "$(peer_addr4)" >/tmp/survivor 2>&1 &
	tries=0
	while ! grep -q connected /tmp/survivor && [ $tries -lt 200 ]; do
		sleep 0.2
		tries=$((tries + 1))
	done
	signal running
	wait $!
	survivor_status=$?
	cat /tmp/survivor
	return $survivor_status
}

# Delays the acknowledgements of this guest by 30 ms, and none of its other packets: those with the
# BTH opcode 0x11 (RC ACKNOWLEDGE), which is 28 bytes behind the begin of the IPv4 header. To be
# called before the first packet (docs/real-verbs.md), answers_were_slow behind the last one.
slow_answers() {
	dev=$(rxe_dev)
	modprobe sch_netem && modprobe sch_prio && modprobe cls_u32 &&
		tc qdisc replace dev "$dev" root handle 1: prio bands 3 priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 &&
		tc qdisc add dev "$dev" parent 1:1 netem limit 10000 delay 30ms &&
		tc filter add dev "$dev" parent 1: protocol ip u32 match ip protocol 17 0xff match u8 0x11 0xff at 28 flowid 1:1
}

# Whether at least this number of packets were delayed. answers_were_slow NUMBER
answers_were_slow() {
	tc -s qdisc show dev "$dev" | grep -A 1 netem
	delayed=$(tc -s qdisc show dev "$dev" | sed -n '/netem/,$s/.*Sent [0-9]* bytes \([0-9]*\) pkt.*/\1/p' | head -1)
	tc qdisc del dev "$dev" root
	[ "$delayed" -ge "$1" ] || { echo "$delayed packets were delayed"; return 1; }
}

# The fabtests of a suite (msg, rdm) whose command matches, on rxe0. fabtests SUITE PATTERN [OPTION...]
fabtests() {
	folder=$WEFT_PROJECT/build/vm/fabtests
	suite=$1
	only=$2
	shift 2
	WEFT_PROVIDER=$WEFT_DIR/libweft-fi.so python3 "$WEFT_PROJECT/tests/conformance/check-fabtests" --suite "$suite" --prov weft \
		--node "$(rxe_addr4)" --fabtests "$folder" --env FI_WEFT_DEVICE=rxe0 --here --only "$only" "$@"
}

# Environment of MPI programs on weft's RDM endpoints: MPICH without shared memory of its own, and the
# copied interpreter. `mpi_env && mpiexec -n 2 python3 PROGRAM`
mpi_env() {
	folder=$WEFT_PROJECT/build/vm/mpich
	export PATH="$folder/mpich/bin:$folder/python/bin:$PATH" PYTHONHOME="$folder/python" PYTHONPATH="$folder/packages"
	export LD_LIBRARY_PATH="$folder/mpich/lib:$folder/python/lib" PYTHONDONTWRITEBYTECODE=1
	export MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 MPIR_CVAR_DEBUG_SUMMARY=1
	export FI_PROVIDER=weft FI_PROVIDER_PATH="$WEFT_DIR" FI_WEFT_DEVICE=rxe0
}
