# Shell functions of the guest: network, rxe0, and what the cases share.
# One guest: veth pair v0-v1, rxe0 on v0. Two guests: rxe0 on the virtual link between them.

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
	# the GIDs of rxe0 follow these addresses; duplicate address detection would hold back the IPv6 one
	ip link set "$dev" up
	ip addr add "$(rxe_addr4)/24" dev "$dev"
	ip addr add "$(rxe_addr6)/64" dev "$dev" nodad
}

rxe_up() {
	rdma link add rxe0 type rxe netdev "$(rxe_dev)" && rxe_wait
}

# Active port and both addresses in the GID table, or failure after ten seconds.
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
