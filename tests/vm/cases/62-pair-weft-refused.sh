# guest: pair
# needs: weft
# seconds: 120
# Writes of RDM endpoints that the device of guest b refuses, while the acknowledgements of guest b
# take 30 ms longer than its other packets. Guest b disconnects after a refusal, so the disconnect
# request arrives before the negative acknowledgement. The error is that of the refusal.
#
# The priority queueing discipline delays packets with the BTH opcode 0x11 (RC ACKNOWLEDGE), which
# is 28 bytes behind the begin of the IPv4 header; it is there before the first packet and until the
# last one (docs/real-verbs.md).
has_netem() { modprobe -q sch_netem && modprobe -q sch_prio && modprobe -q cls_u32; }
slow_answers() {
	dev=$(rxe_dev)
	tc qdisc replace dev "$dev" root handle 1: prio bands 3 priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 &&
		tc qdisc add dev "$dev" parent 1:1 netem limit 10000 delay 30ms &&
		tc filter add dev "$dev" parent 1: protocol ip u32 match ip protocol 17 0xff match u8 0x11 0xff at 28 flowid 1:1
}
b() {
	has_netem || skip "no sch_netem, sch_prio or cls_u32 for this kernel in the guest"
	slow_answers && signal slow || return 1
	FI_WEFT_DEVICE=rxe0 with weft "$WEFT_PROJECT/build/vm/refused" -s weft "$(rxe_addr4)" 5003 "$(peer_addr4):5001"
	status=$?
	tc -s qdisc show dev "$dev" | grep -A 1 netem
	delayed=$(tc -s qdisc show dev "$dev" | sed -n '/netem/,$s/.*Sent [0-9]* bytes \([0-9]*\) pkt.*/\1/p' | head -1)
	tc qdisc del dev "$dev" root
	[ "$delayed" -ge 20 ] || { echo "$delayed packets were delayed"; return 1; }
	return $status
}
a() {
	has_netem || skip "no sch_netem, sch_prio or cls_u32 for this kernel in the guest"
	await slow 60 || return 1
	FI_WEFT_DEVICE=rxe0 with weft "$WEFT_PROJECT/build/vm/refused" weft "$(rxe_addr4)" 5001 "$(peer_addr4):5003"
}
