# The guest is as the tier requires: kernel 6.16 or newer, rdma-core 61 or newer, an active rxe0. An
# older kernel, which only `check --kernel` gives, has no on-demand regions.
run() {
	kernel=$(uname -r)
	core=$(dpkg-query -W -f '${Version}' libibverbs1)
	echo "kernel $kernel, rdma-core $core"
	dpkg --compare-versions "$core" ge 61 || return 1
	ibv_devices | grep -q rxe0 || return 1
	ibv_devinfo -d rxe0 -v >/tmp/devinfo || return 1
	grep -q 'PORT_ACTIVE' /tmp/devinfo || return 1
	# both addresses are in the GID table
	grep -q '10.77.0.1' /tmp/devinfo && grep -q 'fd77::1' /tmp/devinfo || { cat /tmp/devinfo; return 1; }
	if has_on_demand; then
		grep -q ODP_SUPPORT /tmp/devinfo
	else
		[ -n "$WEFT_VM_KERNEL" ] && ! grep ODP_SUPPORT /tmp/devinfo
	fi
}
