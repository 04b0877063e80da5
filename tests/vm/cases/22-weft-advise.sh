# needs: weft
# Advice through weft. On rxe of Linux 7.2 no region of weft is on demand (18-weft-table), so each
# advice is ENOENT. It is not passed to the device, because rxe would take a pinned region for an
# on-demand one, and the kernel would panic. A refresh of a region that stays pinned is EOPNOTSUPP.
# rxe has no count of prefetched pages: its counters are printed, and mincore shows the resident
# pages. Then ibv_advise_mr without weft: every advice, flag and error. An older kernel
# (`check --kernel`) refuses on-demand regions.
run() {
	with weft "$FIPEER" -s -p weft -d rxe0 advise 10.77.0.1 >/tmp/out || { cat /tmp/out; return 1; }
	cat /tmp/out
	for flags in 0 1; do
		for advice in 0 1 2; do
			grep -q "^pinned advice $advice flags $flags: -2 " /tmp/out || return 1
		done
		grep -q "^pinned advice 3 flags $flags: -95 " /tmp/out && grep -q "^none flags $flags: -22$" /tmp/out || return 1
	done
	[ "$(grep -c '^pinned advice . flags 2: -22 ' /tmp/out)" = 4 ] && grep -q '^closed .*: -22 ' /tmp/out || return 1
	grep -q '^refresh: -95$' /tmp/out && grep -q '^prefetched: -95, 1$' /tmp/out || return 1
	grep -q '^xrcd -95$' /tmp/out || return 1 # no software device of the kernel has XRC
	echo "counters: $(cd /sys/class/infiniband/rxe0/ports/1/hw_counters && echo *); of regions: $(rdma statistic show mr 2>&1 | head -3)"
	if has_on_demand; then
		python3 "$WEFT_PROJECT/tests/vm/programs/advise.py"
	else
		python3 "$WEFT_PROJECT/tests/vm/programs/advise.py" >/tmp/out 2>&1
		tail -1 /tmp/out
		grep -q 'register a MR.*Errno: 95' /tmp/out
	fi
}
