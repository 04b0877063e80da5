# The guest is as the tier requires: kernel 6.16 or newer, rdma-core 61 or newer, an active rxe0.
run() {
	kernel=$(uname -r)
	core=$(dpkg-query -W -f '${Version}' libibverbs1)
	echo "kernel $kernel, rdma-core $core"
	dpkg --compare-versions "${kernel%%-*}" ge 6.16 || return 1
	dpkg --compare-versions "$core" ge 61 || return 1
	ibv_devices | grep -q rxe0 || return 1
	ibv_devinfo -d rxe0 -v >/tmp/devinfo || return 1
	grep -q 'PORT_ACTIVE' /tmp/devinfo || return 1
	# both addresses are in the GID table
	grep -q '10.77.0.1' /tmp/devinfo && grep -q 'fd77::1' /tmp/devinfo || { cat /tmp/devinfo; return 1; }
	grep -A 30 'general_odp_caps' /tmp/devinfo | grep -q ODP_SUPPORT
}
